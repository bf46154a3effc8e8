"""What the processes run that tests fork from a server."""

import os
import signal
import stat
from pathlib import Path

import torch
from tiny import tiny_config
from torch import nn

from softprune import io
from softprune.train.run import resume, start

# Tracing imports a thousand modules when it is first used: once here, in the server, not in every child.
torch.export.export(nn.Identity(), (torch.zeros(1),))


def train_or_resume_in_two(work: str, name: str, rank: int, port: int, time_limit: float | None) -> None:
    """One of two processes that start the run ``name`` or go on with it, as torchrun would set them up."""
    os.chdir(work)
    world = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
    }
    os.environ.update({key: str(value) for key, value in world.items()})
    path = Path(name)
    if (path / "config.toml").exists():
        resume(path, time_limit=time_limit)
    else:
        start(tiny_config(Path()), path, time_limit=time_limit)


def train_or_resume(work: str, name: str, die_in_write: int, overrides: tuple[str, ...] = ()) -> None:
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
        io.os.fsync = killing_fsync  # type: ignore[attr-defined]
    path = Path(name)
    if (path / "config.toml").exists():
        resume(path)
    else:
        settings = ("train.epochs=4", "train.compact_at=3", "records.checkpoint_steps=7", *overrides)
        start(tiny_config(Path(), *settings), path)
