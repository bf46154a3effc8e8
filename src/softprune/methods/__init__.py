"""Pruning methods: each usable in a plain PyTorch loop, and by name through the registry."""

from softprune.methods.base import Pruner
from softprune.methods.fpgm import FpgmPruner
from softprune.methods.layerwise import L1Pruner, RandomPruner
from softprune.methods.registry import REGISTRY, Method
from softprune.methods.scp import SoftPruner
from softprune.methods.scp_target import TargetSoftPruner
from softprune.methods.scratch import ScratchPruner, from_scratch
from softprune.methods.sfp import SfpPruner
from softprune.methods.slimming import SlimmingPruner
from softprune.methods.sss import SssPruner
from softprune.methods.summary import SiteSummary, Summary
from softprune.methods.variational import VariationalPruner

__all__ = [
    "REGISTRY",
    "FpgmPruner",
    "L1Pruner",
    "Method",
    "Pruner",
    "RandomPruner",
    "ScratchPruner",
    "SfpPruner",
    "SiteSummary",
    "SlimmingPruner",
    "SoftPruner",
    "SssPruner",
    "Summary",
    "TargetSoftPruner",
    "VariationalPruner",
    "from_scratch",
]
