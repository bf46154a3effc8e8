"""The constants of SCP's masks. They stand here so that recipes and reports are read without torch."""

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
"""The smallest value of each number, and what it must be less than."""


@dataclass(frozen=True, kw_only=True)
class MaskConfig:
    """Constants of SCP's masks and of its sparsity loss (section 3 of the paper).

    ``delta`` and ``tau`` are the paper's. ``k``, ``c`` and ``s`` are absent from it and come from the authors' code.
    """

    delta: float = 0.05
    """A channel counts as dead where the output of the activation stays within ``delta`` of zero."""
    delta_two_sided: float = 0.05
    """The same threshold where both tails of the channel reach the next layer: activations such as LeakyReLU or
    none at all, and every site when ``use_relu`` is off. The paper does not give its value."""
    tau: float = 0.5
    """Temperature of the relaxed Bernoulli sample; towards 0 the sample becomes binary."""
    k: float = 20.0
    """Slope of the drop probability around ``c``."""
    c: float = 0.95
    """Dead probability above which a channel is pruned."""
    s: float = 2.0
    """Weight of ``|gamma|`` beside ``beta`` in the sparsity loss: how many standard deviations of the channel should
    lie below the threshold. The paper's CIFAR-100 runs used 3."""
    eps: float = 1e-8
    """Added to ``|gamma|``, so that a constant channel has a dead probability."""
    gate_statistics: GateStatistics = "both"
    """Which running statistics are not updated in a channel whose sample is off: ``"both"``; ``"mean"``, as in the
    authors' VGG networks, whose running variance is updated in every step; or ``"none"``, as in plain BatchNorm."""
    use_relu: bool = True
    """False is the paper's ablation "SCP without ReLU": decide from BatchNorm alone, two-sided everywhere."""

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
