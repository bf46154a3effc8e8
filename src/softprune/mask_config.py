"""The constants of SCP's masks. They stand here so that recipes and reports are read without torch."""

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from softprune.errors import ConfigError, check_choice, is_bool, is_number

GateStatistics = Literal["both", "mean", "none"]

_WORDS = {"gt": "more than", "ge": "at least", "lt": "less than"}


def _number(default: float, **bounds: float) -> Any:
    return field(default=default, metadata=bounds)


@dataclass(frozen=True, kw_only=True)
class MaskConfig:
    """Constants of SCP's masks and of its sparsity loss (section 3 of the paper).

    ``delta`` and ``tau`` are the paper's. ``k``, ``c`` and ``s`` are absent from it and come from the authors' code.
    """

    delta: float = _number(0.05, gt=0, lt=1)
    """A channel counts as dead where the output of the activation stays within ``delta`` of zero."""
    delta_two_sided: float = _number(0.05, gt=0, lt=1)
    """The same threshold where both tails of the channel reach the next layer: activations such as LeakyReLU or
    none at all, and every site when ``use_relu`` is off. The paper does not give its value."""
    tau: float = _number(0.5, gt=0)
    """Temperature of the relaxed Bernoulli sample; towards 0 the sample becomes binary."""
    k: float = _number(20.0, gt=0)
    """Slope of the drop probability around ``c``."""
    c: float = _number(0.95, gt=0, lt=1)
    """Dead probability above which a channel is pruned."""
    s: float = _number(2.0, ge=0)
    """Weight of ``|gamma|`` beside ``beta`` in the sparsity loss: how many standard deviations of the channel should
    lie below the threshold. The paper's CIFAR-100 runs used 3."""
    # Below 1e-12 the density of an almost constant channel can overflow float32 in the gradient of gamma.
    eps: float = _number(1e-8, ge=1e-12)
    """Added to ``|gamma|``, so that a constant channel has a dead probability."""
    gate_statistics: GateStatistics = "both"
    """Which running statistics are not updated in a channel whose sample is off: ``"both"``; ``"mean"``, as in the
    authors' VGG networks, whose running variance is updated in every step; or ``"none"``, as in plain BatchNorm."""
    use_relu: bool = True
    """False is the paper's ablation "SCP without ReLU": decide from BatchNorm alone, two-sided everywhere."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value, bounds = getattr(self, each.name), each.metadata
            if not bounds:
                continue
            if not is_number(value) or not math.isfinite(value) or not _within(value, **bounds):
                rule = " and ".join(f"{_WORDS[name]} {bound:g}" for name, bound in bounds.items())
                raise ConfigError(f"`{each.name}` of the masks must be a finite number, {rule}. Got {value!r}.")
            object.__setattr__(self, each.name, float(value))
        check_choice("`gate_statistics` of the masks", self.gate_statistics, get_args(GateStatistics))
        if not is_bool(self.use_relu):
            raise ConfigError(f"`use_relu` of the masks must be True or False. Got {self.use_relu!r}.")
        object.__setattr__(self, "use_relu", bool(self.use_relu))


def _within(value: float, gt: float = -math.inf, ge: float = -math.inf, lt: float = math.inf) -> bool:
    return gt < value < lt and value >= ge
