"""Pruning methods: each usable in a plain PyTorch loop, and by name through :data:`REGISTRY`.

Read `base.py` (`Pruner`) and its base, `cutting.py`, first; then `scp.py`, or `ranking.py` for methods that rank
channels.
"""

from softprune.methods.base import Pruner as Pruner
from softprune.methods.cutting import SiteSummary as SiteSummary
from softprune.methods.cutting import Summary as Summary
from softprune.methods.fpgm import FpgmPruner as FpgmPruner
from softprune.methods.layerwise import L1Pruner as L1Pruner
from softprune.methods.layerwise import LayerwisePruner as LayerwisePruner
from softprune.methods.layerwise import RandomPruner as RandomPruner
from softprune.methods.ranking import OneShotPruner as OneShotPruner
from softprune.methods.scp import SoftPruner as SoftPruner
from softprune.methods.scp_target import TargetSoftPruner as TargetSoftPruner
from softprune.methods.scratch import ScratchPruner as ScratchPruner
from softprune.methods.scratch import from_scratch as from_scratch
from softprune.methods.sfp import SfpPruner as SfpPruner
from softprune.methods.slimming import SlimmingPruner as SlimmingPruner
from softprune.methods.sss import SssPruner as SssPruner
from softprune.methods.variational import VariationalPruner as VariationalPruner

REGISTRY: dict[str, type[Pruner]] = {
    pruner.name: pruner
    for pruner in (
        SoftPruner,
        TargetSoftPruner,
        SlimmingPruner,
        SfpPruner,
        FpgmPruner,
        SssPruner,
        VariationalPruner,
        L1Pruner,
        RandomPruner,
        ScratchPruner,
    )
}
"""The methods by name: read by recipes, CLI, tests, docs and reports."""
