"""Cut a network by hard masks to a smaller network with the same outputs.

Start with `plan.py` (`make_plan`) and `apply.py` (`cut_`). `analyses.py` finds the channels that are constant under the
masks and those that must stay. `verify.py` verifies a cut, `trial.py` runs trial cuts before the training, and
`selection.py` selects the sites.
"""

# ruff: isort: skip_file
from softprune.cut.plan import written as written
from softprune.cut.plan import make_plan as make_plan
from softprune.cut.analyses import blocks_of_sites as blocks_of_sites
from softprune.cut.analyses import coupled_sites as coupled_sites
from softprune.cut.analyses import floor_masks as floor_masks
from softprune.cut.analyses import required_sites as required_sites
from softprune.cut.plan import ModuleCut as ModuleCut
from softprune.cut.plan import PrunePlan as PrunePlan
from softprune.cut.apply import apply_plan as apply_plan
from softprune.cut.apply import plain_copy as plain_copy
from softprune.cut.apply import plans_of as plans_of
from softprune.cut.apply import remap_optimizer as remap_optimizer
from softprune.cut.saved import Origin as Origin
from softprune.cut.saved import load as load
from softprune.cut.saved import read_origin as read_origin
from softprune.cut.saved import read_plans as read_plans
from softprune.cut.saved import save as save
from softprune.cut.saved import saved_path as saved_path
from softprune.cut.verify import Certificate as Certificate
from softprune.cut.verify import cut_and_verify as cut_and_verify
from softprune.cut.verify import verify as verify
