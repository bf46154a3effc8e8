"""A pruner and its optimizer: parameter groups, checks, and hooks around each step."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from softprune.errors import ConfigError, first_few
from softprune.log import get_logger
from softprune.masks import MaskedBatchNorm

logger = get_logger(__name__)


class OptimizerHooks:
    """Hooks before and after every step of an optimizer.

    They do nothing once the optimizer no longer trains `trained`, since :func:`softprune.remap_optimizer` moves an
    optimizer to another network.
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
        self._before, self._after = before, after
        self._handles = [
            optimizer.register_step_pre_hook(self._hook(self._before_step)),
            optimizer.register_step_post_hook(self._hook(self._after_step)),
        ]

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Run the work before a step or, if a closure computes the gradients, after each of its calls."""

        def wrapped(given: Any) -> Any:
            return functools.partial(self._call, given) if callable(given) else given

        _, *others = args
        if any(map(callable, (*others, *kwargs.values()))):
            return (optimizer, *map(wrapped, others)), {name: wrapped(value) for name, value in kwargs.items()}
        self._before()
        return None

    def _call(self, closure: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = closure(*args, **kwargs)
        self._before()
        return result

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._after(optimizer)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, work: Callable[[Optimizer, Any, Any], Any]) -> Callable[[Optimizer, Any, Any], Any]:
        @torch.compiler.disable  # in a compiled step, Dynamo would trace what runs on the host, for minutes
        def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
            if any(each is self._trained for group in optimizer.param_groups for each in group["params"]):
                return work(optimizer, args, kwargs)
            # step() is iterating over the hooks: they stay, without the pruner.
            self._before, self._after = lambda: None, lambda optimizer: None

        return hook


def check_trains(optimizer: Optimizer, sites: Mapping[str, MaskedBatchNorm]) -> None:
    """Raise a ConfigError unless the optimizer trains scale and shift of every site."""
    owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    missing = [name for name, bn in sites.items() if id(bn.bias) not in owned or id(bn.weight) not in owned]
    if missing:
        remedy = "make it from pruner.parameter_groups(), or let one of your optimizers train all BatchNorms"
        if not all(sites[name].bias.requires_grad and sites[name].weight.requires_grad for name in missing):
            remedy = "set requires_grad=False before you make the pruner, so that they are no sites"
        raise ConfigError(
            "the attached optimizer must train scale and shift of every site. "
            f"Got one without those of {first_few([*map(repr, missing)])}; {remedy}."
        )


def warn_of_decay(optimizer: Optimizer, sites: Mapping[str, MaskedBatchNorm]) -> None:
    """Warn if weight decay acts on the shifts of some sites."""
    decayed = {
        id(parameter)
        for group in optimizer.param_groups
        if float(group.get("weight_decay", 0) or 0) != 0
        for parameter in group["params"]
    }
    names = [name for name, bn in sites.items() if id(bn.bias) in decayed]
    if names:
        logger.warning(
            "softprune: weight decay acts on the shifts of %d masked BatchNorms (%s): it holds dead channels back and "
            "changes the method; use pruner.parameter_groups(weight_decay=...)",
            len(names),
            first_few(names),
        )


def undecayed_biases(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the groups of SCP's authors: weights and BatchNorm scales decay, shifts and biases do not."""
    decayed: list[nn.Parameter] = []
    spared: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (spared if name.rpartition(".")[2] == "bias" else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": spared, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def all_decayed(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the group of the authors of SFP, FPGM and L1: all parameters decay."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [{"params": parameters, "weight_decay": weight_decay}]
