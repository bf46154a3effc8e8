"""Read regular files of limited size, and write files atomically, even in a crash."""

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path

from softprune.errors import CheckpointError, FileFormatError

LARGEST_NETWORK = 2**34
"""Maximum size in bytes of a file with weights or a checkpoint."""
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_atomically(path: Path, content: bytes | Iterable[bytes], *, then: str, follow_link: bool = False) -> None:
    """Write a temporary file next to ``path``, sync it to disk, and rename it to ``path``.

    A symbolic link at ``path`` is replaced, since a run folder from someone else could link to any file. With
    ``follow_link``, the target of the link is replaced instead. On failure the temporary file is removed, the previous
    content of ``path`` is kept, and a CheckpointError is raised. Its message ends with ``then``: what to do once the
    cause is fixed.
    """
    try:
        if follow_link and path.is_symlink():
            path = Path(os.path.realpath(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.name:  # "/" or "."
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        # A random name, since several threads or processes may write the file. It must not exceed the length limit.
        temporary = path.with_name(f".{path.name[:50]}.{secrets.token_hex(4)}.tmp")
        try:
            with open(temporary, "wb") as file:
                for piece in [content] if isinstance(content, bytes) else content:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()
        _sync_folder(path.parent)
    except OSError as error:
        raise unwritable(path, error, then) from error


def read_bytes(path: Path, limit: int = 2**28) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes; raise a FileFormatError for other files.

    Use it for all files that may come from someone else: opening a named pipe would block, and reading a device or a
    huge sparse file would exhaust the memory.
    """
    try:
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                raise FileFormatError(f"{path} must be a regular file. Got another kind of file; remove it.")
            if facts.st_size > limit:
                raise FileFormatError(
                    f"{path} must have at most {limit:,} bytes. Got {facts.st_size:,}; it was not written by softprune."
                )
            return file.read(facts.st_size)
    except FileFormatError:
        raise
    except (OSError, ValueError) as error:  # open() raises ValueError for a path with a NUL byte
        raise FileFormatError(
            f"{path} must be readable. Got {getattr(error, 'strerror', error)}; check the path and its permissions."
        ) from error


def unwritable(path: Path, error: OSError, then: str) -> CheckpointError:
    """Return the CheckpointError for a ``path`` that could not be written."""
    if isinstance(error, IsADirectoryError):
        return CheckpointError(
            f"The path to write to must be a file. Got {path}, which is a folder; choose a file in it, or remove it, "
            f"then {then}."
        )
    if error.errno not in _NO_SPACE:
        return CheckpointError(
            f"The folder of {path.name or path} must be writable. Got {error.strerror or error} at {path}. "
            f"Everything saved before is intact: fix the folder, then {then}."
        )
    folder = next(parent for parent in path.absolute().parents if parent.is_dir())
    return CheckpointError(
        f"The disk must have room for {path.name}. Got {error.strerror or error}, with "
        f"{shutil.disk_usage(folder).free / 2**20:.1f} MiB free at {path.parent}. Everything saved before is "
        f"intact: free some space, then {then}."
    )


def _sync_folder(folder: Path) -> None:
    # The rename is durable only after the folder itself is synced.
    if os.name == "nt":
        return  # Windows cannot open folders
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
