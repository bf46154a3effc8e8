"""softprune: train a CNN and prune its channels in one run, then remove the dead channels physically.

pruner = softprune.SoftPruner(model, example, strength=1e-4)
...
loss = pruner.loss(task_loss)   # the one changed line of your loop
...
small = pruner.compact()        # an ordinary, smaller nn.Module, verified equal
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from softprune import bench, data, export, models
    from softprune.costs import Cost, cost
    from softprune.distillation import distillation_loss
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
    "distillation_loss",
    "export",
    "inspect",
    "load",
    "models",
    "remap_optimizer",
    "save",
    "verify",
]

_PACKAGES = (
    "bench",
    "budget",
    "data",
    "errors",
    "export",
    "graph",
    "inspection",
    "masks",
    "methods",
    "models",
    "plan",
    "surgery",
)
_DEFINED_IN = {
    "Cost": "costs",
    "Inspection": "inspection",
    "MaskConfig": "masks",
    "PrunePlan": "plan",
    "Pruner": "methods",
    "SoftPruner": "methods",
    "SoftpruneError": "errors",
    "Summary": "methods",
    "apply_plan": "surgery",
    "cost": "costs",
    "distillation_loss": "distillation",
    "inspect": "inspection",
    "load": "surgery",
    "remap_optimizer": "surgery",
    "save": "surgery",
    "verify": "surgery",
}

if not TYPE_CHECKING:  # a type checker would accept any name of a module that has __getattr__

    def __getattr__(name: str) -> Any:
        """Import a public name on first use, so that `softprune --help` does not import torch."""
        if name in _PACKAGES:
            return importlib.import_module(f"softprune.{name}")
        if name not in _DEFINED_IN:
            raise AttributeError(f"module 'softprune' has no attribute {name!r}", name=name)
        value = getattr(importlib.import_module(f"softprune.{_DEFINED_IN[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
