"""Distributed training: the processes that torchrun started, or a single one."""

import copy
import hashlib
import os
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from softprune.errors import ConfigError, first_line

T = TypeVar("T")

_JOIN_SECONDS = 0.1
"""How often a process looks whether all have joined."""


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

    def unused_parameters(self, network: nn.Module, example: Tensor) -> list[nn.Parameter]:
        """Return the parameters that the output in training does not depend on; none in a single process."""
        if self.size == 1:
            return []
        probe = copy.deepcopy(network).train()
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            probe(example).sum().backward()
        used = {name for name, parameter in probe.named_parameters() if parameter.grad is not None}
        return [each for name, each in network.named_parameters() if each.requires_grad and name not in used]

    def wrap(self, model: nn.Module, unused: Sequence[nn.Parameter]) -> nn.Module:
        """Wrap the network, which has these unused parameters, in DistributedDataParallel.

        DDP broadcasts the buffers of rank 0 before each forward, so the running statistics, and with them the
        checkpoint, are those of rank 0.
        """
        if self.size == 1:
            return model
        devices = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(_WithUnused(model, unused) if unused else model, device_ids=devices)


class _WithUnused(nn.Module):
    """A network whose output depends on ``unused`` parameters too, with gradient 0: DDP waits for all gradients.

    They are of layers that forward() does not call, or that lie before a dead branch of a compact network. What a
    method adds to the loss may depend on them, so that DDP cannot search for them itself.
    """

    def __init__(self, network: nn.Module, unused: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.network, self._unused = network, unused

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images) + sum((0 * parameter).sum() for parameter in self._unused)


def join_world(device: str = "auto") -> World:
    """Join the process group that torchrun started, or return a world of one process."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 and "RANK" not in os.environ:
        return World(rank=0, size=1, device=pick_device(device))
    own = pick_device(device, int(os.environ.get("LOCAL_RANK", "0")))
    if own.type == "cuda":
        torch.cuda.set_device(own)
    if not dist.is_initialized():
        try:
            store, rank, size = _join()
        except ValueError as error:
            raise ConfigError(
                f"Several processes must have the variables that torchrun sets. Got WORLD_SIZE = {size} and: "
                f"{first_line(error)}. Start them with torchrun, or unset WORLD_SIZE and RANK to use one process."
            ) from error
        dist.init_process_group("nccl" if own.type == "cuda" else "gloo", store=store, rank=rank, world_size=size)
    return World(rank=dist.get_rank(), size=dist.get_world_size(), device=own)


def may_restart() -> bool:
    """Return whether torchrun starts this process again after a failure (`--max-restarts`)."""
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") not in ("", "0")


def _join() -> "tuple[dist.distributed_c10d.Store, int, int]":
    """Return a store that only the processes of this attempt use, the rank of this one, and their number.

    torchrun may keep its store when it restarts processes. It then still has the addresses of the earlier processes,
    which the new ones would wait for. So each process writes a random key, and the hash of all keys names the part of
    the store that they use. With the key of an earlier process the hash differs, and not all processes choose it.
    """
    # Not every build of torch has them.
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, rank, size = next(rendezvous("env://"))
    keys, parts = [f"softprune/{each}" for each in range(size)], set[str]()
    store.set(keys[rank], secrets.token_hex(16))
    deadline = time.monotonic() + store.timeout.total_seconds()
    while time.monotonic() < deadline:
        part = hashlib.sha256(b"".join(store.multi_get(keys))).hexdigest()
        store.add(part, int(part not in parts))
        parts.add(part)
        for each in parts:
            if store.add(each, 0) == size:
                return PrefixStore(each, store), rank, size
        time.sleep(_JOIN_SECONDS)
    raise dist.DistStoreError(f"fewer than {size} processes at {os.environ.get('MASTER_ADDR')}")


def is_lost_process(error: BaseException) -> bool:
    """Return whether ``error`` says that another process of the group cannot be reached: it has ended."""
    # Gloo raises plain RuntimeErrors, which name its source files.
    return dist.is_available() and (isinstance(error, dist.DistError) or "/gloo/" in str(error))


def leave_world() -> None:
    """Destroy the process group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def pick_device(device: str = "auto", local_rank: int = 0) -> torch.device:
    """Resolve ``auto``, ``cpu``, ``cuda`` or ``cuda:N`` to the device of this process."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch("cpu|cuda(:(0|[1-9][0-9]?))?", device):
        raise ConfigError(f"--device must be auto, cpu, cuda or cuda:N. Got {device!r}.")
    chosen = torch.device(device)
    if chosen.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"--device {device} needs a GPU that this PyTorch can use. Got none; try --device cpu.")
        index = local_rank if chosen.index is None else chosen.index
        if index >= torch.cuda.device_count():
            raise ConfigError(
                f"--device {device} must be one of the {torch.cuda.device_count()} GPUs here. Got number {index}."
            )
        return torch.device("cuda", index)
    return chosen
