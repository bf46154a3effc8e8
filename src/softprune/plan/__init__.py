"""From hard masks to the decision what every module keeps."""

from softprune.plan.build import dense_macs, make_plan
from softprune.plan.coupling import coupled_sites
from softprune.plan.cuts import ModuleCut, ParameterCut
from softprune.plan.plan import PrunePlan
from softprune.plan.required import required_sites

__all__ = [
    "ModuleCut",
    "ParameterCut",
    "PrunePlan",
    "coupled_sites",
    "dense_macs",
    "make_plan",
    "required_sites",
]
