"""Write files so that a reader sees the old content or the new, never a part, also after a crash."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable, Iterator
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
        with open(temporary, "wb") as file:
            for piece in [content] if isinstance(content, bytes) else content:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary files that a killed process left in ``folder``."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    # The rename itself is only durable once the folder is on disk.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
