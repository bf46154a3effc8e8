"""Constants of SCP's masks. Does not import PyTorch, so that recipes and reports can be read without it."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from softprune.errors import ConfigError, check_choice, is_number

GateStatistics = Literal["both", "mean", "none"]

_RANGES = {
    "delta": (1e-6, 1.0),
    "delta_two_sided": (1e-6, 1.0),
    "tau": (1e-6, math.inf),
    "k": (1e-6, math.inf),
    "c": (1e-6, 1.0),
    "s": (0.0, math.inf),
    # Below 1e-12 the density of an almost constant channel can overflow float32 in the gradient of gamma.
    "eps": (1e-12, math.inf),
}
"""Inclusive minimum and exclusive maximum of each constant."""


@dataclass(frozen=True, kw_only=True)
class MaskConfig:
    """Constants of SCP's masks and sparsity loss (section 3 of the paper).

    ``delta`` and ``tau`` are from the paper; ``k``, ``c`` and ``s`` are not in it and are from the authors' code.
    """

    delta: float = 0.05
    """A channel counts as dead if the activation's output stays within ``delta`` of zero."""
    delta_two_sided: float = 0.05
    """The threshold for sites where both tails of the distribution reach the next layer: those with an activation such
    as LeakyReLU or none, and all sites if ``use_relu`` is False. Its value is not in the paper."""
    tau: float = 0.5
    """Temperature of the relaxed Bernoulli distribution; samples become binary as it approaches 0."""
    k: float = 20.0
    """Slope of the drop probability around ``c``."""
    c: float = 0.95
    """Dead probability above which a channel is pruned."""
    s: float = 2.0
    """Weight of ``|gamma|`` relative to ``beta`` in the sparsity loss: the number of standard deviations of the channel
    that should lie below the threshold. The paper's CIFAR-100 runs use 3."""
    eps: float = 1e-8
    """Added to ``|gamma|``, so that the dead probability of a constant channel is defined."""
    gate_statistics: GateStatistics = "both"
    """Which running statistics are not updated while a channel's sampled mask is off: ``"both"``; ``"mean"``, as in the
    authors' VGG networks, whose running variance is always updated; or ``"none"``, as in plain BatchNorm."""
    use_relu: bool = True
    """False is the paper's ablation "SCP without ReLU": use the BatchNorm alone, with two-sided thresholds."""

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not is_number(value) or not low <= value < high:
                raise ConfigError(
                    f"`{name}` of the masks must be a number of at least {low:g} and less than {high:g}. Got {value!r}."
                )
            object.__setattr__(self, name, float(value))
        check_choice("`gate_statistics` of the masks", self.gate_statistics, get_args(GateStatistics))
        object.__setattr__(self, "use_relu", bool(self.use_relu))
