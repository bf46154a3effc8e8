"""From hard masks to the decision what every module keeps.

Read `build.py` (`make_plan`) first: `constants.py` finds the channels that are constant under the masks, `liveness.py`
those that must stay, and `cuts.py` says what one module keeps.
"""

from softprune.plan.build import dense_macs as dense_macs
from softprune.plan.build import make_plan as make_plan
from softprune.plan.coupling import coupled_sites as coupled_sites
from softprune.plan.coupling import floor_masks as floor_masks
from softprune.plan.coupling import required_sites as required_sites
from softprune.plan.cuts import ModuleCut as ModuleCut
from softprune.plan.plan import PrunePlan as PrunePlan
