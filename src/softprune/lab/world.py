"""Distributed training: the processes started by torchrun, or a single process."""

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
    """Rank, size and device of this process in the process group."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_writer(self) -> bool:
        """Whether this process is rank 0, the only one that writes files."""
        return self.rank == 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def max(self, value: int) -> int:
        """Return the maximum over all processes, so that all of them take the same decision."""
        if self.size == 1:
            return value
        tensor = torch.tensor(value, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return int(tensor)

    def broadcast(self, value: T) -> T:
        """Return rank 0's value in every process."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, device=self.device)
        return box[0]

    def barrier(self) -> None:
        """Wait until every process has reached this point."""
        if self.size > 1:
            dist.barrier()

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap the network in DistributedDataParallel.

        DDP broadcasts rank 0's buffers before each forward pass, so the running statistics in a checkpoint are those
        of rank 0. With ``static_graph``, DDP finds the parameters without a gradient in the first step, such as those
        before a dead branch of a compact network.
        """
        if self.size == 1:
            return model
        devices = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices, static_graph=True)


@contextmanager
def join_world(device: str = "auto") -> Iterator[World]:
    """Join the process group started by torchrun and leave it on exit. Without torchrun, yield a world of size 1."""
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
            f"--device must be auto, cpu, cuda or cuda:N, where N is a GPU that PyTorch can use. Got {device!r} and "
            f"{count} GPUs; try --device cpu."
        )
    return torch.device(device)
