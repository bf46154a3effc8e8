"""One process, or several started by torchrun: who writes, how totals are summed, how the network is
wrapped."""

import os
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
    """The processes that train together, seen from one of them."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_writer(self) -> bool:
        """Whether this process writes the run's files."""
        return self.rank == 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replace ``tensor`` by its sum over all processes."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def largest(self, value: int) -> int:
        """The largest of the processes' values, so that all of them decide alike."""
        if self.size == 1:
            return value
        tensor = torch.tensor(value, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return int(tensor)

    def share(self, value: T) -> T:
        """The first process's value, in all of them."""
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
        """The network whose backward averages gradients over the processes.

        Running statistics are those of the first process (DDP sends its buffers to the others before each
        forward), so that one process's checkpoint is everybody's state.
        """
        if self.size == 1:
            return model
        devices = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices)


def join_world(device: str = "auto") -> World:
    """Join the processes that torchrun started, or be the only one."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 and "RANK" not in os.environ:
        return World(rank=0, size=1, device=pick_device(device))
    own = pick_device(device, int(os.environ.get("LOCAL_RANK", "0")))
    if own.type == "cuda":
        torch.cuda.set_device(own)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if own.type == "cuda" else "gloo")
    return World(rank=dist.get_rank(), size=dist.get_world_size(), device=own)


def leave_world() -> None:
    """Close the connections to the other processes, if there are any."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def pick_device(device: str = "auto", local_rank: int = 0) -> torch.device:
    """The device that ``auto``, ``cpu``, ``cuda`` or ``cuda:N`` means for this process."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"--device must be auto, cpu, cuda or cuda:N. Got {device!r}.") from error
    if chosen.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device must be auto, cpu, cuda or cuda:N. Got {device!r}.")
    if chosen.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                f"--device {device} needs a GPU that this PyTorch can use. Got none; try --device cpu."
            )
        index = local_rank if chosen.index is None else chosen.index
        if index >= torch.cuda.device_count():
            raise ConfigError(
                f"--device {device} must be one of the {torch.cuda.device_count()} GPUs here. Got number "
                f"{index}."
            )
        return torch.device("cuda", index)
    return chosen
