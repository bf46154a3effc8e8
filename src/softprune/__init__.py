"""softprune: channels that learn to be silent while a network trains, then are cut out for good.

pruner = softprune.SoftPruner(model, example, strength=1e-4)
...
loss = pruner.loss(task_loss)   # the one changed line of your loop
...
small = pruner.compact()        # an ordinary, smaller nn.Module, verified equal
"""

from softprune import bench, data, export, models
from softprune.cost import Cost, cost
from softprune.errors import SoftpruneError
from softprune.inspection import Inspection, inspect
from softprune.masks import MaskConfig
from softprune.methods import Pruner, SoftPruner, Summary
from softprune.plan import PrunePlan
from softprune.surgery import apply_plan, load, remap_optimizer, save, verify

__version__ = "0.1.0"

__all__ = [
    "Cost",
    "Inspection",
    "MaskConfig",
    "PrunePlan",
    "Pruner",
    "SoftPruner",
    "SoftpruneError",
    "Summary",
    "__version__",
    "apply_plan",
    "bench",
    "cost",
    "data",
    "export",
    "inspect",
    "load",
    "models",
    "remap_optimizer",
    "save",
    "verify",
]
