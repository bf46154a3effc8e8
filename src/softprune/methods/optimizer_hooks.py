"""A pruner on an optimizer: what it asks of one, and hooks that ride along while both train the same network."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from softprune.errors import ConfigError
from softprune.masks import MaskedBatchNorm

logger = logging.getLogger(__name__)


class Ride:
    """Hooks around every step of an optimizer.

    They leave by themselves when it no longer trains `trained`: :func:`softprune.remap_optimizer` takes it to another
    network.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        trained: nn.Parameter,
        before: Callable[[], None],
        after: Callable[[Optimizer], None],
    ) -> None:
        self.optimizer = optimizer
        self._trained = trained
        self._handles = [
            optimizer.register_step_pre_hook(self._hook(lambda _: before())),
            optimizer.register_step_post_hook(self._hook(after)),
        ]

    def leave(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, work: Callable[[Optimizer], None]) -> Callable[[Optimizer, Any, Any], None]:
        def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if any(each is self._trained for group in optimizer.param_groups for each in group["params"]):
                work(optimizer)
            else:
                self.leave()

        return hook


def check_optimizer(optimizer: object) -> None:
    """Raise unless its steps can be counted."""
    if not hasattr(optimizer, "register_step_post_hook"):
        raise ConfigError(
            f"a pruner rides on a torch.optim.Optimizer. Got {type(optimizer).__name__}; attach what calls step() on "
            "the weights (of a wrapper, the optimizer inside)."
        )


def check_trains(optimizer: Optimizer, sites: Mapping[str, MaskedBatchNorm]) -> None:
    """Raise unless it trains scale and shift of every site."""
    owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    missing = [name for name, bn in sites.items() if id(bn.bias) not in owned or id(bn.weight) not in owned]
    if missing:
        raise ConfigError(
            "the attached optimizer must train scale and shift of every site. "
            f"Got one without those of {', '.join(map(repr, missing[:3]))}{' ...' if len(missing) > 3 else ''}; "
            "make it from pruner.parameter_groups() or model.parameters()."
        )


def warn_of_decay(optimizer: Optimizer, sites: Mapping[str, MaskedBatchNorm]) -> None:
    """Say which sites' shifts stand in a parameter group with weight decay, if any do."""
    decayed = {
        id(parameter)
        for group in optimizer.param_groups
        if float(group.get("weight_decay", 0) or 0) != 0
        for parameter in group["params"]
    }
    names = [name for name, bn in sites.items() if id(bn.bias) in decayed]
    if names:
        logger.warning(
            "weight decay acts on the shifts of %d masked BatchNorms (%s%s): it holds dead channels back and "
            "changes the method; use pruner.parameter_groups(weight_decay=...)",
            len(names),
            ", ".join(names[:3]),
            " ..." if len(names) > 3 else "",
        )
