"""From hard masks to the decision what every module keeps."""

from softprune.plan.build import dense_macs, make_plan
from softprune.plan.coupling import coupled_sites, floor_masks, required_sites
from softprune.plan.cuts import ModuleCut, ParameterCut
from softprune.plan.plan import PrunePlan

__all__ = [
    "ModuleCut",
    "ParameterCut",
    "PrunePlan",
    "coupled_sites",
    "dense_macs",
    "floor_masks",
    "make_plan",
    "required_sites",
]
