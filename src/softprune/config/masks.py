"""The constants of SCP's masks."""

from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Lt

from softprune.config.schema import Section

GateStatistics = Literal["both", "mean", "none"]
_Probability = Annotated[float, Gt(0), Lt(1)]


class MaskConfig(Section):
    """Constants of SCP's masks and of its sparsity loss (section 3 of the paper).

    ``delta`` and ``tau`` are the paper's. ``k``, ``c`` and ``s`` are absent from it and come from the authors' code.
    """

    section: ClassVar[str] = "masks"

    delta: _Probability = 0.05
    """A channel counts as dead where the output of the activation stays within ``delta`` of zero."""
    delta_two_sided: _Probability = 0.05
    """The same threshold where both tails of the channel reach the next layer: activations such as LeakyReLU or
    none at all, and every site when ``use_relu`` is off. The paper does not give its value."""
    tau: Annotated[float, Gt(0)] = 0.5
    """Temperature of the relaxed Bernoulli sample; towards 0 the sample becomes binary."""
    k: Annotated[float, Gt(0)] = 20.0
    """Slope of the drop probability around ``c``."""
    c: _Probability = 0.95
    """Dead probability above which a channel is pruned."""
    s: Annotated[float, Ge(0)] = 2.0
    """Weight of ``|gamma|`` beside ``beta`` in the sparsity loss: how many standard deviations of the channel should
    lie below the threshold. The paper's CIFAR-100 runs used 3."""
    # Below 1e-12 the density of an almost constant channel can overflow float32 in the gradient of gamma.
    eps: Annotated[float, Ge(1e-12)] = 1e-8
    """Added to ``|gamma|``, so that a constant channel has a dead probability."""
    gate_statistics: GateStatistics = "both"
    """Which running statistics are not updated in a channel whose sample is off: ``"both"``; ``"mean"``, as in the
    authors' VGG networks, whose running variance is updated in every step; or ``"none"``, as in plain BatchNorm."""
    use_relu: bool = True
    """False is the paper's ablation "SCP without ReLU": decide from BatchNorm alone, two-sided everywhere."""
