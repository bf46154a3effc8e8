"""Apply a plan to a network, verify the result, remap the optimizer, save and load.

Read `apply.py` (`cut_`) first. `verify.py` proves a cut, and `probe.py` tries cuts before any training.
"""

from softprune.surgery.apply import apply_plan as apply_plan
from softprune.surgery.apply import plain_copy as plain_copy
from softprune.surgery.apply import plans_of as plans_of
from softprune.surgery.comparison import without_gc as without_gc
from softprune.surgery.optimizer import remap_optimizer as remap_optimizer
from softprune.surgery.probe import probe_cuts as probe_cuts
from softprune.surgery.saved import LARGEST_INPUT as LARGEST_INPUT
from softprune.surgery.saved import Origin as Origin
from softprune.surgery.saved import check_saved_shapes as check_saved_shapes
from softprune.surgery.saved import load as load
from softprune.surgery.saved import read_origin as read_origin
from softprune.surgery.saved import read_plans as read_plans
from softprune.surgery.saved import save as save
from softprune.surgery.saved import saved_path as saved_path
from softprune.surgery.verify import Certificate as Certificate
from softprune.surgery.verify import verify as verify
from softprune.surgery.verify import verify_plan as verify_plan
