"""The sections [method] and [masks] of a recipe: what prunes the network, and the constants of SCP's masks."""

from typing import Annotated, Literal, Self

from annotated_types import Ge, Gt, Le, Lt
from pydantic import Field, model_validator

from softprune.lab.config.schema import Amount, Count, Globs, Options, PositiveCount, Section
from softprune.target import FINAL_AT, read_target

GateStatistics = Literal["both", "mean", "none"]
_Probability = Annotated[float, Gt(0), Lt(1)]

TITLES = {
    "scp": "SCP",
    "scp-target": "SCP (target ratio)",
    "slimming": "Slimming",
    "sfp": "SFP",
    "fpgm": "FPGM",
    "sss": "SSS",
    "variational": "Variational Pruning",
    "l1": "L1",
    "random": "Random",
    "scratch": "Same shape from scratch",
}
"""The names of the methods in tables. They stand here, not at the methods, since a report is written without torch."""


class MaskConfig(Section, section="masks"):
    """Constants of SCP's masks and of its sparsity loss (section 3 of the paper).

    ``delta`` and ``tau`` are the paper's. ``k``, ``c`` and ``s`` are absent from it and come from the authors' code.
    """

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


class MethodConfig(Section, section="method"):
    """The pruning method."""

    name: str = "scp"
    """A name from `softprune methods`, `dense` for a baseline without pruning, or `module:Class` for a pruner of your
    own (docs/own-method.md)."""
    strength: Amount = 1e-4
    """Weight of the sparsity loss (the paper's lambda): larger prunes more. Not used with a target."""
    target: dict[str, float | str] = Field(default_factory=dict)
    """Instead of a strength, a budget that the run meets: a quantity (docs/budgets.md lists them) with the share to
    keep (0.5 or "50%") or the figure itself, as in `target = {macs = 0.5}`. Empty for none."""
    cost_weighting: Annotated[float, Ge(0), Le(1)] = 0.0
    """Exponent a of the cost in the sparsity loss: the strength of a channel is proportional to (MACs that its
    removal saves) to the power a, or to what the target measures. 0 gives all channels the same strength."""
    final_at: Annotated[float, Gt(0), Lt(1)] = FINAL_AT
    """Share of the training after which the cut of a target is final, at the latest. Give less when trained weights are
    pruned in few epochs: the compact network then has longer to recover."""
    latency_batch: PositiveCount = 1
    """Images per forward pass at which a `latency` target is measured, on the device of the run."""
    latency_table: str = ""
    """For a `latency` target of another machine, the file of what softprune.budget.latency_table measured there; it is
    used instead of a measurement."""
    strength_warmup_epochs: Amount = 0.0
    """Epochs over which the strength first rises linearly from zero; for starts from trained weights."""
    include: Globs = ()
    """Globs on BatchNorm names: prune only these. Empty for all that can be pruned."""
    exclude: Globs = ()
    """Globs on BatchNorm names that are not pruned."""
    round_to: PositiveCount | Literal["auto"] = 1
    """Keep widths at multiples of this; the channels least likely dead are added. `auto` times some convolutions on
    the device of the run and takes the multiple that is fastest there; a run resumed elsewhere keeps it."""
    min_channels: Count = 0
    """Keep at least this many channels at every site; sites around a depthwise convolution keep them in common."""
    options: Options = Field(default_factory=dict)
    """Settings of the method itself, by keyword, as `softprune methods` lists them."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.target:
            read_target(self.target)
        return self
