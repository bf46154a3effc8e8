"""The constants of the masks, with the values the authors trained with."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from softprune.errors import ConfigError

GateStatistics = Literal["both", "mean", "none"]

# Below this, the density of an almost constant channel can overflow float32 on its way back to gamma.
_SMALLEST_EPS = 1e-12


@dataclass(frozen=True, kw_only=True)
class MaskConfig:
    """Constants of SCP's masks and of its sparsity loss (the paper's section 3).

    ``delta`` and ``tau`` are the paper's; ``k``, ``c`` and ``s`` are absent from it and come from the
    authors' released code.
    """

    delta: float = 0.05
    """A channel counts as dead where the activation's output stays within ``delta`` of zero. In (0, 1)."""

    delta_two_sided: float = 0.05
    """The same threshold where both tails of the channel reach the next layer: activations such as
    LeakyReLU or none at all, and every site when ``use_relu`` is off. The paper leaves its value open."""

    tau: float = 0.5
    """Temperature of the relaxed Bernoulli sample; towards 0 the sample becomes binary. Above 0."""

    k: float = 20.0
    """Slope of the drop probability around ``c``. Above 0."""

    c: float = 0.95
    """Dead probability above which a channel is pruned. In (0, 1)."""

    s: float = 2.0
    """Weight of ``|gamma|`` beside ``beta`` in the sparsity loss: how many standard deviations of the
    channel should lie below the threshold. The paper's CIFAR-100 runs used 3. At least 0."""

    eps: float = 1e-8
    """Added to ``|gamma|``, so that a constant channel has a dead probability. At least 1e-12."""

    gate_statistics: GateStatistics = "both"
    """Which running statistics stand still in a channel whose sample is off: ``"both"``; ``"mean"``, the
    authors' VGG networks, whose running variance moves on every step; or ``"none"``, plain BatchNorm."""

    use_relu: bool = True
    """False is the paper's ablation "SCP without ReLU": decide from BatchNorm alone, two-sided everywhere."""

    def __post_init__(self) -> None:
        for name in ("delta", "delta_two_sided", "tau", "k", "c", "s", "eps"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ConfigError(f"MaskConfig.{name} must be a finite number. Got {value!r}.")
        for name in ("delta", "delta_two_sided", "c"):
            value = getattr(self, name)
            if not 0 < value < 1:
                raise ConfigError(f"MaskConfig.{name} must lie strictly between 0 and 1. Got {value!r}.")
        for name in ("tau", "k"):
            value = getattr(self, name)
            if value <= 0:
                raise ConfigError(f"MaskConfig.{name} must be above 0. Got {value!r}.")
        if self.s < 0:
            raise ConfigError(f"MaskConfig.s must be at least 0. Got {self.s!r}.")
        if self.eps < _SMALLEST_EPS:
            raise ConfigError(f"MaskConfig.eps must be at least {_SMALLEST_EPS:g}. Got {self.eps!r}.")
        if self.gate_statistics not in get_args(GateStatistics):
            allowed = ", ".join(repr(mode) for mode in get_args(GateStatistics))
            raise ConfigError(
                f"MaskConfig.gate_statistics must be one of {allowed}. Got {self.gate_statistics!r}."
            )
        if not isinstance(self.use_relu, bool):
            raise ConfigError(f"MaskConfig.use_relu must be True or False. Got {self.use_relu!r}.")
