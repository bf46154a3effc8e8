"""Write files and folders so that a reader sees the old content or the new, never a part, also after a crash."""

import contextlib
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from softprune.errors import CheckpointError

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_GO_ON = "`softprune resume` goes on"


def write_atomically(path: Path, content: bytes | Iterable[bytes], *, then: str = _GO_ON) -> None:
    """Write under a temporary name beside ``path``, force it to disk, then rename it into place.

    When the disk is full the temporary file is removed and a CheckpointError says how much was missing;
    whatever was at ``path`` before is untouched. ``then`` ends the message: what to do once there is room.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _written_beside(path, content) as temporary:
            os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise unwritable(path, error, then) from error


def create_file(path: Path, content: bytes) -> None:
    """Write a file that must be new, whole or not at all; an OSError (FileExistsError if it is there) if not."""
    with _written_beside(path, content) as temporary:
        try:
            os.link(temporary, path)  # as a rename, but refused where there is a file
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            with open(path, "xb") as file:
                file.write(content)
    _sync_folder(path.parent)


def unwritable(path: Path, error: OSError, then: str = _GO_ON) -> CheckpointError:
    """What to tell the user when ``path`` could not be written."""
    if error.errno not in _NO_SPACE:
        return CheckpointError(
            f"The folder of {path.name} must be writable. Got {error.strerror or error} at {path}. "
            f"Nothing that was saved before is lost; mend the folder, then {then}."
        )
    folder = next(parent for parent in path.absolute().parents if parent.is_dir())
    return CheckpointError(
        f"The disk must have room for {path.name}. Got {error.strerror or error}, with "
        f"{shutil.disk_usage(folder).free / 2**20:.1f} MiB free at {path.parent}. Everything saved before is "
        f"intact: make room, then {then}."
    )


@contextlib.contextmanager
def _written_beside(path: Path, content: bytes | Iterable[bytes]) -> Iterator[Path]:
    """A temporary file beside ``path`` with the content, on disk; gone afterwards, if not renamed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        _write(temporary, content)
        yield temporary
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _write(path: Path, content: bytes | Iterable[bytes]) -> None:
    with open(path, "wb") as file:
        for piece in [content] if isinstance(content, bytes) else content:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary files that a killed process left in ``folder``."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    # The rename itself is only durable once the folder is on disk.
    if os.name == "nt":
        return  # Windows opens no folders
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_folder(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write a folder of files beside its place, force it to disk, and let it take an earlier one's place.

    One rename cannot replace a folder, so that an earlier one is set aside for a moment. Whoever is killed just then
    leaves it there, whole, and :func:`reading_folder` or the next write puts it back; that write also removes what
    killed ones left. Writers and readers in the same parent folder wait for each other, where its file system has
    locks; where it has none, leftovers stay. An OSError (of a full disk, say) leaves the earlier folder as it was.
    """
    with _locked(folder.parent, alone=True) as locked:
        _put_back(folder)
        if locked:  # nobody else is at work: what looks like work under way is not
            _remove(_under_way(folder))
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".new", dir=folder.parent))
        try:
            for name, content in contents.items():
                _write(temporary / name, content)
            temporary.chmod(0o755)
            _sync_folder(temporary)
            _swap(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def reading_folder(folder: Path) -> Iterator[None]:
    """While a folder of :func:`write_folder` is read: put back if it was set aside, and not replaced meanwhile."""
    if not os.path.lexists(folder) and _set_aside(folder):
        with _locked(folder.parent, alone=True):
            _put_back(folder)
    with _locked(folder.parent, alone=False):
        yield


def _swap(temporary: Path, folder: Path) -> None:
    """Rename `temporary` to `folder`; an earlier one makes way first and is removed last."""
    if not folder.exists():
        os.rename(temporary, folder)
        _sync_folder(folder.parent)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
    try:
        os.rename(folder, old / folder.name)
        os.rename(temporary, folder)
    except BaseException:
        _put_back(folder)
        _remove([old])
        raise
    _sync_folder(folder.parent)
    _remove([old])


def _put_back(folder: Path) -> None:
    """Rename the latest folder that was set aside to `folder`, if nothing is there."""
    found = _set_aside(folder)
    if found and not os.path.lexists(folder):
        os.rename(max(found, key=lambda path: path.parent.stat().st_mtime_ns), folder)
        _sync_folder(folder.parent)


def _set_aside(folder: Path) -> list[Path]:
    inside = (
        path / folder.name for path in _under_way(folder) if path.name.startswith(f".{folder.name}.old.")
    )
    return [path for path in inside if path.is_dir()]


def _under_way(folder: Path) -> list[Path]:
    """What :func:`write_folder` has made beside `folder`, and not taken away yet."""
    # As mkdtemp names them; a prefix alone would take those of a folder `name.other` for ours.
    ours = re.compile(rf"\.{re.escape(folder.name)}\.(old\.[a-z0-9_]{{8}}|[a-z0-9_]{{8}}\.new)")
    try:
        return [path for path in folder.parent.iterdir() if ours.fullmatch(path.name) and path.is_dir()]
    except OSError:
        return []  # no such folder, or one that may not be listed


def _remove(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path, *, alone: bool) -> Iterator[bool]:
    """Hold `folder`, alone or with others who read; gives whether it can be held.

    The lock is the folder's own: it leaves no file behind, and a kill frees it.
    """
    descriptor, locked = None, False
    # Not every system has locks, nor every network file system.
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        locked = True
    try:
        yield locked
    finally:
        if descriptor is not None and locked:
            # Closing is not enough: a child that was forked meanwhile has the descriptor, too.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        if descriptor is not None:
            os.close(descriptor)
