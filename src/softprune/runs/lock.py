"""A lock file: one process at a time works on what lies beside it."""

import contextlib
import fcntl
import logging
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)

_held: set[IO[str]] = set()
"""Locks of this process."""


def _let_go_in_child() -> None:
    # A forked child (a loader's worker) shares the lock, and would keep it when we are killed.
    for file in _held:
        file.close()
    _held.clear()


os.register_at_fork(after_in_child=_let_go_in_child)


@contextlib.contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Hold the lock file ``path``, which says who holds it; a BlockingIOError with those words if another does.

    The kernel gives the lock back when the process ends, however it ends. The file stays: were it deleted, two
    processes could hold locks on two files of the same name.
    """
    with open(path, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise BlockingIOError(error.errno, file.read().strip() or "another process") from None
        except OSError as error:  # some network file systems have none
            logger.warning(
                "%s cannot be locked (%s): see to it that no other process writes there", path, error
            )
        _held.add(file)
        try:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}\n")
            file.flush()
            yield
        finally:
            _held.discard(file)
