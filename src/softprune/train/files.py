"""Write files so that a reader sees the old content or the new, never a part, also after a crash."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from softprune.errors import CheckpointError

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_atomically(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Write under a temporary name beside ``path``, force it to disk, then rename it into place.

    When the disk is full the temporary file is removed and a CheckpointError says how much was missing;
    whatever was at ``path`` before is untouched.
    """
    pieces = [content] if isinstance(content, bytes) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if error.errno not in _NO_SPACE:
            raise CheckpointError(
                f"The run's folder must be writable. Got {error.strerror or error} at {path}. "
                "Nothing that was saved before is lost; mend the folder, then `softprune resume` goes on."
            ) from error
        free = shutil.disk_usage(path.parent).free
        raise CheckpointError(
            f"The disk must have room for {path.name}. Got {error.strerror or error}, with "
            f"{free / 2**20:.1f} MiB free at {path.parent}. Everything saved before is intact: make room, "
            "then `softprune resume` goes on."
        ) from error


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
