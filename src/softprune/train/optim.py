"""SGD as the authors use it, with its learning rate on the device so that a CUDA graph can change it."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from softprune.errors import ConfigError


def make_sgd(
    groups: Iterable[dict[str, Any]], *, lr: float, momentum: float = 0.9, nesterov: bool = True
) -> torch.optim.SGD:
    """SGD whose learning rate is one float32 tensor on the parameters' device, shared by all groups.

    The momentum starts at zero rather than at the first gradient, which is the same without dampening, and
    makes the first step like all others. The fused kernel is the one that reads the rate on the device.
    """
    groups = list(groups)
    devices = {parameter.device for group in groups for parameter in group["params"]}
    if len(devices) != 1:
        raise ConfigError(
            f"All parameters must be on one device, and there must be some. Got {sorted(map(str, devices))}."
        )
    rate = torch.full((1,), lr, device=devices.pop())
    optimizer = torch.optim.SGD(groups, lr=rate, momentum=momentum, nesterov=nesterov, fused=True)
    share_rate(optimizer, rate)
    if momentum:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                buffer = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                optimizer.state[parameter]["momentum_buffer"] = buffer
    return optimizer


def share_rate(optimizer: torch.optim.Optimizer, rate: Tensor) -> None:
    """Make ``rate`` the learning rate of every group; a loaded state_dict puts copies in its place."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def match_layout(optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer's tensors the memory order of their parameters, as fused kernels require."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                state[key] = torch.empty_like(parameter).copy_(value)


def match_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Fused kernels compare strides even of dimensions of size one, where autograd leaves them open."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is not None and gradient.stride() != parameter.stride():
                parameter.grad = gradient.as_strided(parameter.shape, parameter.stride())
