"""Several processes that train one network, as torchrun starts them; nothing happens where there is one."""

import torch.distributed as dist
from torch import Tensor


def several_processes() -> bool:
    """Whether this process is one of several that are connected."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def take_from_first_(*tensors: Tensor) -> None:
    """Give every process the values of the first one. All of them must call it together."""
    if several_processes():
        for tensor in tensors:
            dist.broadcast(tensor, src=0)
