"""Distributed training: the processes that torchrun started, or a single one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from softprune.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """The process group, seen from one process."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_writer(self) -> bool:
        """Whether this process is rank 0, which writes the files of the run."""
        return self.rank == 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def max(self, value: int) -> int:
        """Return the maximum over all processes, so that all of them decide alike."""
        if self.size == 1:
            return value
        tensor = torch.tensor(value, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return int(tensor)

    def broadcast(self, value: T) -> T:
        """Return the value of rank 0."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, device=self.device)
        return box[0]

    def barrier(self) -> None:
        """Wait for every process."""
        if self.size > 1:
            dist.barrier()

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap the network in DistributedDataParallel.

        DDP broadcasts the buffers of rank 0 before each forward, so the running statistics, and with them the
        checkpoint, are those of rank 0. Every step has the same graph: DDP notices in the first one which parameters
        get no gradient, such as those before a dead branch of a compact network.
        """
        if self.size == 1:
            return model
        devices = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices, static_graph=True)


@contextmanager
def join_world(device: str = "auto") -> Iterator[World]:
    """Join the process group that torchrun started, or be a world of one process; leave it at the end."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    own = pick_device(device, int(os.environ.get("LOCAL_RANK", "0")))
    if own.type == "cuda":
        torch.cuda.set_device(own)
    if size == 1 and "RANK" not in os.environ:
        yield World(rank=0, size=1, device=own)
        return
    try:
        dist.init_process_group("nccl" if own.type == "cuda" else "gloo")
        yield World(rank=dist.get_rank(), size=dist.get_world_size(), device=own)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def pick_device(device: str = "auto", local_rank: int = 0) -> torch.device:
    """Resolve ``auto``, ``cpu``, ``cuda`` or ``cuda:N`` to the device of this process."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        device = "cuda" if count else "cpu"
    if device == "cuda":
        device = f"cuda:{local_rank}"
    if device != "cpu" and device not in (f"cuda:{index}" for index in range(count)):
        raise ConfigError(
            f"--device must be auto, cpu, cuda or cuda:N, a GPU that this PyTorch can use. Got {device!r} and {count} "
            "GPUs; try --device cpu."
        )
    return torch.device(device)
