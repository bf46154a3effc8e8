"""Apply a plan to a network, prove it equal, carry the optimizer over, and keep it on disk."""

from softprune.surgery.apply import apply_plan, plain_copy, plans_of
from softprune.surgery.optimizer import remap_optimizer
from softprune.surgery.probe import prove
from softprune.surgery.saved import Origin, load, read_origin, read_plans, save
from softprune.surgery.verify import Certificate, verify, verify_plan

__all__ = [
    "Certificate",
    "Origin",
    "apply_plan",
    "load",
    "plain_copy",
    "plans_of",
    "prove",
    "read_origin",
    "read_plans",
    "remap_optimizer",
    "save",
    "verify",
    "verify_plan",
]
