"""All methods by name: one entry each, read by recipes, CLI, tests, docs and reports."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from softprune.methods.base import Pruner
from softprune.methods.fpgm import FpgmPruner
from softprune.methods.l1 import L1Pruner
from softprune.methods.random import RandomPruner
from softprune.methods.scp import SoftPruner
from softprune.methods.scp_target import TargetSoftPruner
from softprune.methods.scratch import ScratchPruner
from softprune.methods.sfp import SfpPruner
from softprune.methods.slimming import SlimmingPruner
from softprune.methods.sss import SssPruner
from softprune.methods.variational import VariationalPruner

# fmt: off
COMMON = (
    "model", "example", "strength", "target", "total_steps", "latency_batch", "masks", "include", "exclude",
    "round_to", "min_channels", "seed",
)
# fmt: on
"""Keywords that recipes have settings of their own for; all others are a method's options."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A pruning method: how to build its pruner, and what lists, pages and tables say of it."""

    build: Callable[..., Pruner]
    """Called as ``build(model, example, **settings)``."""
    title: str
    """Its name in tables."""
    description: str
    """What it does, in a line."""
    paper: str
    """Where it was published; empty for controls."""
    suggested: Mapping[str, Any] = field(default_factory=dict)
    """Settings to start from: strength and options."""
    continues: bool = False
    """Whether training may go on behind a physical cut: each channel's fate depends on itself alone."""
    reconstruction: bool = False
    """Rebuilt from the paper alone: no code of its authors exists to compare with."""
    control: bool = False
    """Not a method to use, but one to hold others against."""

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the settings that only this method has."""
        return tuple(name for name in inspect.signature(self.build).parameters if name not in COMMON)

    @property
    def penalised(self) -> bool:
        """Whether `strength` means something to it."""
        return "strength" in inspect.signature(self.build).parameters


REGISTRY: dict[str, Method] = {
    "scp": Method(
        build=SoftPruner,
        title="SCP",
        description="soft channel pruning: masks from BatchNorm shift and scale, learned with the weights",
        paper="Kang and Han, ICML 2020",
        suggested={"strength": 1e-4},
        continues=True,
    ),
    "scp-target": Method(
        build=TargetSoftPruner,
        title="SCP (target ratio)",
        description="SCP that ends at a given share of channels, without a search for the strength",
        paper="Kang and Han, ICML 2020",
        suggested={"strength": 1e-3, "ratio": 0.4},
    ),
    "slimming": Method(
        build=SlimmingPruner,
        title="Slimming",
        description="L1 penalty on BatchNorm scales, then one threshold over all of them; to be fine-tuned",
        paper="Liu et al., ICCV 2017",
        suggested={"strength": 1e-4, "ratio": 0.7},
    ),
    "sfp": Method(
        build=SfpPruner,
        title="SFP",
        description="the filters of smallest norm set to zero after every epoch, free to grow back",
        paper="He et al., IJCAI 2018",
        suggested={"ratio": 0.4},
    ),
    "fpgm": Method(
        build=FpgmPruner,
        title="FPGM",
        description="the filters nearest to all others set to zero after every epoch, gradients masked",
        paper="He et al., CVPR 2019",
        suggested={"ratio_dist": 0.4},
    ),
    "sss": Method(
        build=SssPruner,
        title="SSS",
        description="a factor on every residual block (or channel), pushed to zero by proximal steps",
        paper="Huang and Wang, ECCV 2018",
        suggested={"strength": 0.01},
    ),
    "variational": Method(
        build=VariationalPruner,
        title="Variational Pruning",
        description="BatchNorm scales with a posterior; those that settle at zero go (a reconstruction)",
        paper="Zhao et al., CVPR 2019",
        suggested={"strength": 2e-6},
        reconstruction=True,
    ),
    "l1": Method(
        build=L1Pruner,
        title="L1",
        description="the filters of smallest L1 norm go out of a trained network, once; to be fine-tuned",
        paper="Li et al., ICLR 2017",
        suggested={"ratio": 0.5},
    ),
    "random": Method(
        build=RandomPruner,
        title="Random",
        description="channels drawn by lot: the control for a method's criterion",
        paper="",
        suggested={"ratio": 0.5},
        control=True,
    ),
    "scratch": Method(
        build=ScratchPruner,
        title="Same shape from scratch",
        description="a finished run's shape trained from new weights: the control for a method's weights",
        paper="",
        continues=True,
        control=True,
    ),
}
