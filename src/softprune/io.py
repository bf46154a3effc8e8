"""Read regular files of a sensible size; write files whole or not at all, also in a crash."""

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
"""Bytes of a file with weights or a checkpoint."""
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_atomically(path: Path, content: bytes | Iterable[bytes], *, then: str, follow_link: bool = False) -> None:
    """Write a temporary file beside ``path``, force it to disk, then rename it to ``path``.

    A symbolic link is replaced, since the folder of a run may be from others and link to any file. With
    ``follow_link`` the file that it points to is replaced. If writing fails, the temporary file is removed, whatever
    was at ``path`` before is untouched, and a CheckpointError states the cause. ``then`` ends its message: what to do
    once the cause is gone.
    """
    try:
        if follow_link and path.is_symlink():
            path = Path(os.path.realpath(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.name:  # "/" or "."
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        # Threads and processes may write one name at once; a long name must leave room for the rest.
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
    """Return the content of a regular file of at most ``limit`` bytes, or raise a FileFormatError that names it.

    Everything that others may have made is read here: a named pipe would wait for a writer, and a link to a device or
    a sparse file would take all memory.
    """
    try:
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                raise FileFormatError(f"{path} must be a regular file. Got another kind of file; remove it.")
            if facts.st_size > limit:
                raise FileFormatError(
                    f"{path} must have at most {limit:,} bytes. Got {facts.st_size:,}; it is not what softprune wrote."
                )
            return file.read(facts.st_size)
    except FileFormatError:
        raise
    except (OSError, ValueError) as error:  # a ValueError if the path has a NUL byte
        raise FileFormatError(
            f"{path} must be readable. Got {getattr(error, 'strerror', error)}; check the path and its permissions."
        ) from error


def unwritable(path: Path, error: OSError, then: str) -> CheckpointError:
    """Return the error for a ``path`` that could not be written."""
    if isinstance(error, IsADirectoryError):
        return CheckpointError(
            f"The path to write to must be that of a file. Got {path}, which is a folder; name a file in it, or remove "
            f"it, then {then}."
        )
    if error.errno not in _NO_SPACE:
        return CheckpointError(
            f"The folder of {path.name or path} must be writable. Got {error.strerror or error} at {path}. "
            f"Nothing that was saved before is lost; repair the folder, then {then}."
        )
    folder = next(parent for parent in path.absolute().parents if parent.is_dir())
    return CheckpointError(
        f"The disk must have room for {path.name}. Got {error.strerror or error}, with "
        f"{shutil.disk_usage(folder).free / 2**20:.1f} MiB free at {path.parent}. Everything saved before is "
        f"intact: make room, then {then}."
    )


def _sync_folder(folder: Path) -> None:
    # The rename itself is only durable once the folder is on disk.
    if os.name == "nt":
        return  # Windows opens no folders
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
