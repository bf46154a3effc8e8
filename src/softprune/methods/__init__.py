"""Pruning methods, usable in a plain PyTorch loop and by name through :data:`REGISTRY`.

Start with `pruner.py`; then read `scp.py`, or `ranking.py` for methods that rank channels.
"""

from softprune.methods.learned import SssPruner as SssPruner
from softprune.methods.learned import VariationalPruner as VariationalPruner
from softprune.methods.pruner import Pruner as Pruner
from softprune.methods.pruner import SiteSummary as SiteSummary
from softprune.methods.pruner import Summary as Summary
from softprune.methods.ranking import FilterPruner as FilterPruner
from softprune.methods.ranking import FpgmPruner as FpgmPruner
from softprune.methods.ranking import L1Pruner as L1Pruner
from softprune.methods.ranking import RandomPruner as RandomPruner
from softprune.methods.ranking import RankingPruner as RankingPruner
from softprune.methods.ranking import SfpPruner as SfpPruner
from softprune.methods.ranking import SlimmingPruner as SlimmingPruner
from softprune.methods.ranking import TaylorPruner as TaylorPruner
from softprune.methods.scp import SoftPruner as SoftPruner
from softprune.methods.scp import TargetSoftPruner as TargetSoftPruner
from softprune.methods.scratch import ScratchPruner as ScratchPruner

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
        TaylorPruner,
        RandomPruner,
        ScratchPruner,
    )
}
"""All methods by name, for recipes, CLI, tests, docs and reports."""
