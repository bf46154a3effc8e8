"""Pruning methods: each usable in a plain PyTorch loop, and by name through the registry."""

from softprune.methods.base import Pruner as Pruner
from softprune.methods.cutting import SiteSummary as SiteSummary
from softprune.methods.cutting import Summary as Summary
from softprune.methods.fpgm import FpgmPruner as FpgmPruner
from softprune.methods.layerwise import L1Pruner as L1Pruner
from softprune.methods.layerwise import RandomPruner as RandomPruner
from softprune.methods.registry import REGISTRY as REGISTRY
from softprune.methods.registry import Method as Method
from softprune.methods.scp import SoftPruner as SoftPruner
from softprune.methods.scp_target import TargetSoftPruner as TargetSoftPruner
from softprune.methods.scratch import ScratchPruner as ScratchPruner
from softprune.methods.scratch import from_scratch as from_scratch
from softprune.methods.sfp import SfpPruner as SfpPruner
from softprune.methods.slimming import SlimmingPruner as SlimmingPruner
from softprune.methods.sss import SssPruner as SssPruner
from softprune.methods.variational import VariationalPruner as VariationalPruner
