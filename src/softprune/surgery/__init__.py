"""Apply a plan to a network, verify the result, remap the optimizer, save and load."""

from softprune.surgery.apply import apply_plan, plain_copy, plans_of
from softprune.surgery.comparison import without_gc
from softprune.surgery.optimizer import remap_optimizer
from softprune.surgery.probe import probe_cuts
from softprune.surgery.saved import (
    LARGEST_INPUT,
    Origin,
    check_saved_shapes,
    load,
    read_origin,
    read_plans,
    save,
    saved_path,
)
from softprune.surgery.verify import Certificate, verify, verify_plan

__all__ = [
    "LARGEST_INPUT",
    "Certificate",
    "Origin",
    "apply_plan",
    "check_saved_shapes",
    "load",
    "plain_copy",
    "plans_of",
    "probe_cuts",
    "read_origin",
    "read_plans",
    "remap_optimizer",
    "save",
    "saved_path",
    "verify",
    "verify_plan",
    "without_gc",
]
