"""What a process that will be killed runs."""

import os
import signal
import stat
from pathlib import Path

from tiny import tiny_config

from softprune.train import files
from softprune.train.run import resume, start


def train_or_resume(work: str, name: str, die_in_write: int) -> None:
    """Start the run ``name`` or go on with it; die within the ``die_in_write``-th write of a file, if not 0."""
    os.chdir(work)
    writes = [die_in_write]
    fsync = os.fsync

    def killing_fsync(descriptor: int) -> None:
        # Files are forced to disk before they get their names: half of this one must never be read.
        writes[0] -= stat.S_ISREG(os.fstat(descriptor).st_mode)
        if writes[0] == 0:
            os.truncate(descriptor, os.fstat(descriptor).st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(descriptor)

    if die_in_write:
        files.os.fsync = killing_fsync  # type: ignore[attr-defined]
    path = Path(name)
    if (path / "config.toml").exists():
        resume(path)
    else:
        start(tiny_config(Path(), "train.epochs=4", "train.compact_at=3", "records.checkpoint_steps=7"), path)
