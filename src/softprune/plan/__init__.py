"""From hard masks to the decision what every module keeps."""

from softprune.plan.cuts import ModuleCut, ParameterCut
from softprune.plan.make import dense_macs, make_plan
from softprune.plan.prune_plan import PrunePlan
from softprune.plan.required import required_sites
from softprune.plan.tied import tied_sites

__all__ = [
    "ModuleCut",
    "ParameterCut",
    "PrunePlan",
    "dense_macs",
    "make_plan",
    "required_sites",
    "tied_sites",
]
