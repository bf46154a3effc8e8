"""Numbers that a method learns beside the network's parameters, and steps itself: factors, standard deviations.

They are not parameters of the model, whose state_dict stays what it was, nor of the optimizer, which stays the
user's. They follow the learning rate and the momentum of the group in which the optimizer has the BatchNorms.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Extra:
    """A vector that is learned, with its velocity. Both only ever change in place."""

    def __init__(self, value: Tensor) -> None:
        self.value = value.clone().requires_grad_()
        self.velocity = torch.zeros_like(value)

    def take_gradient(self) -> Tensor:
        """The gradient since the last step, the mean over all processes; the next one starts from zero."""
        gradient = self.value.grad
        self.value.grad = None
        if gradient is None:
            return torch.zeros_like(self.velocity)
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            distributed.all_reduce(gradient)
            gradient = gradient / distributed.get_world_size()
        return gradient

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


def pace_of(optimizer: Optimizer, parameter: Tensor) -> tuple[float | Tensor, float]:
    """(learning rate, momentum) of the group that holds `parameter`; Adam's first beta counts as momentum."""
    for group in optimizer.param_groups:
        if any(member is parameter for member in group["params"]):
            return group["lr"], float(group.get("momentum", group.get("betas", (0.0,))[0]))
    raise AssertionError("attach() has checked that the optimizer has it")
