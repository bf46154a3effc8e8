"""The methods by name: one entry each, read by recipes, CLI, tests, docs and reports."""

from dataclasses import dataclass

from softprune.methods.base import Pruner
from softprune.methods.fpgm import FpgmPruner
from softprune.methods.layerwise import L1Pruner, RandomPruner
from softprune.methods.options import PrunerOptions, keywords_of
from softprune.methods.scp import SoftPruner
from softprune.methods.scp_target import TargetSoftPruner
from softprune.methods.scratch import ScratchPruner
from softprune.methods.sfp import SfpPruner
from softprune.methods.slimming import SlimmingPruner
from softprune.methods.sss import SssPruner
from softprune.methods.variational import VariationalPruner

_RECIPE_KEYS = {
    *("strength", "target", "total_steps", "final_at", "latency_batch", "cost_weighting", "masks"),
    *PrunerOptions.__annotations__,
}
"""Keywords that recipes have keys of their own for; all others are a method's options."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A pruning method: how to build its pruner, and how lists, pages and tables describe it."""

    build: type[Pruner]
    """Called as ``build(model, example, **settings)``."""
    title: str
    """Its name in tables."""
    description: str
    """What it does, in a line."""
    continues: bool = False
    """Whether training may continue after a physical cut: each channel is decided on its own."""

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the settings that only this method has."""
        return tuple(name for name in self.keywords if name not in _RECIPE_KEYS)

    @property
    def keywords(self) -> tuple[str, ...]:
        """All keyword arguments of its pruner."""
        return keywords_of(self.build)

    @property
    def penalised(self) -> bool:
        """Whether `strength` means something to it."""
        return "strength" in self.keywords


REGISTRY: dict[str, Method] = {
    "scp": Method(
        build=SoftPruner,
        title="SCP",
        description="soft channel pruning: masks from BatchNorm shift and scale, learned with the weights",
        continues=True,
    ),
    "scp-target": Method(
        build=TargetSoftPruner,
        title="SCP (target ratio)",
        description="SCP that ends at a given share of channels, without a search for the strength",
    ),
    "slimming": Method(
        build=SlimmingPruner,
        title="Slimming",
        description="L1 penalty on BatchNorm scales, then one threshold over all of them; to be fine-tuned",
    ),
    "sfp": Method(
        build=SfpPruner,
        title="SFP",
        description="the filters of smallest norm set to zero after every epoch, free to grow back",
    ),
    "fpgm": Method(
        build=FpgmPruner,
        title="FPGM",
        description="the filters nearest to all others set to zero after every epoch, gradients masked",
    ),
    "sss": Method(
        build=SssPruner,
        title="SSS",
        description="a factor on every residual block (or channel), pushed to zero by proximal steps",
    ),
    "variational": Method(
        build=VariationalPruner,
        title="Variational Pruning",
        description="BatchNorm scales with a posterior; those that end at zero are removed (a reconstruction)",
    ),
    "l1": Method(
        build=L1Pruner,
        title="L1",
        description="removes the filters of smallest L1 norm from a trained network, once; to be fine-tuned",
    ),
    "random": Method(
        build=RandomPruner, title="Random", description="random channels: the control for a method's criterion"
    ),
    "scratch": Method(
        build=ScratchPruner,
        title="Same shape from scratch",
        description="a finished run's shape trained from new weights: the control for a method's weights",
        continues=True,
    ),
}
