"""softprune: train a CNN and prune its channels in one run, then remove the dead channels physically.

pruner = softprune.SoftPruner(model, example, strength=1e-4)
...
loss = pruner.loss(task_loss)   # the one changed line of your loop
...
small = pruner.compact()        # an ordinary, smaller nn.Module, verified equal
"""

import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from softprune import bench as bench
    from softprune import data as data
    from softprune import export as export
    from softprune import models as models
    from softprune.costs import Cost as Cost
    from softprune.costs import cost as cost
    from softprune.distillation import distillation_loss as distillation_loss
    from softprune.errors import SoftpruneError as SoftpruneError
    from softprune.inspection import Inspection as Inspection
    from softprune.inspection import inspect as inspect
    from softprune.masks import MaskConfig as MaskConfig
    from softprune.methods import Pruner as Pruner
    from softprune.methods import SoftPruner as SoftPruner
    from softprune.methods import Summary as Summary
    from softprune.plan import PrunePlan as PrunePlan
    from softprune.surgery import apply_plan as apply_plan
    from softprune.surgery import load as load
    from softprune.surgery import remap_optimizer as remap_optimizer
    from softprune.surgery import save as save
    from softprune.surgery import verify as verify

__version__ = "0.1.0"

_NAMES = {
    "costs": ("Cost", "cost"),
    "distillation": ("distillation_loss",),
    "errors": ("SoftpruneError",),
    "inspection": ("Inspection", "inspect"),
    "masks": ("MaskConfig",),
    "methods": ("Pruner", "SoftPruner", "Summary"),
    "plan": ("PrunePlan",),
    "surgery": ("apply_plan", "load", "remap_optimizer", "save", "verify"),
}
_DEFINED_IN = {name: module for module, names in _NAMES.items() for name in names}
__all__ = [*_DEFINED_IN, "__version__", "bench", "data", "export", "models"]

if not TYPE_CHECKING:  # a type checker would accept any name of a module that has __getattr__

    def __getattr__(name: str) -> Any:
        """Import a public name or a module on first use, so that `softprune --help` does not import torch."""
        if name in _DEFINED_IN:
            value = getattr(importlib.import_module(f"softprune.{_DEFINED_IN[name]}"), name)
            globals()[name] = value
            return value
        if name.startswith("_") or importlib.util.find_spec(f"softprune.{name}") is None:
            raise AttributeError(f"module 'softprune' has no attribute {name!r}", name=name)
        return importlib.import_module(f"softprune.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
