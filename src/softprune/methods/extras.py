"""Numbers that a method learns beside the network's parameters, and steps itself: factors, standard deviations.

They are not parameters of the model, whose state_dict stays what it was, nor of the optimizer, which stays the
user's. They follow the learning rate and the momentum of the group in which the optimizer has the BatchNorms.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from softprune.distributed import is_distributed


class Extra:
    """A vector that is learned, with its velocity. Both only ever change in place."""

    def __init__(self, value: Tensor) -> None:
        self.value = value.clone().requires_grad_()
        self.velocity = torch.zeros_like(value)

    def take_gradient(self) -> Tensor:
        """The gradient since the last step; the next one starts from zero."""
        gradient = self.value.grad
        self.value.grad = None
        return torch.zeros_like(self.velocity) if gradient is None else gradient

    def to(self, device: torch.device) -> None:
        """Follow the model to another device."""
        if self.value.device != device:
            self.value = self.value.detach().to(device).requires_grad_()
            self.velocity = self.velocity.to(device)

    def __deepcopy__(self, memo: dict[int, Any]) -> Extra:
        twin = Extra(self.value.detach())
        twin.velocity.copy_(self.velocity)
        return twin

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of both."""
        return {"value": self.value.detach().clone(), "velocity": self.velocity.clone()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from :meth:`state_dict`."""
        self.value.copy_(state["value"])
        self.velocity.copy_(state["velocity"])


def take_gradients(extras: Iterable[Extra]) -> list[Tensor]:
    """The gradients of all, the mean over all processes, which exchange them at once."""
    gradients = [extra.take_gradient() for extra in extras]
    if not is_distributed():
        return gradients
    together = torch.cat(gradients)
    dist.all_reduce(together)
    return list((together / dist.get_world_size()).split([len(each) for each in gradients]))


def paces_of(optimizer: Optimizer, parameters: Iterable[Tensor]) -> list[tuple[float | Tensor, float]]:
    """(learning rate, momentum) of the group that holds each parameter; Adam's first beta counts as momentum."""
    groups = {id(member): group for group in optimizer.param_groups for member in group["params"]}
    return [
        (group["lr"], float(group.get("momentum", group.get("betas", (0.0,))[0])))
        for group in (groups[id(parameter)] for parameter in parameters)
    ]
