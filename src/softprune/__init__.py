"""softprune: train a CNN and prune its channels in one run, then remove the dead channels.

pruner = softprune.SoftPruner(model, example, strength=1e-4)
...
loss = pruner.loss(task_loss)   # the only change in your training loop
...
small = pruner.compact()        # a smaller, ordinary nn.Module, verified to have the same outputs
"""

import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from softprune import bench, export, models
    from softprune.costs import Cost, cost
    from softprune.cut import PrunePlan, apply_plan, load, remap_optimizer, save, verify
    from softprune.cut.selection import Inspection, inspect
    from softprune.errors import SoftpruneError
    from softprune.masks import MaskConfig
    from softprune.methods import Pruner, SoftPruner, Summary
    from softprune.methods.distillation import distillation_loss

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
    "distillation_loss",
    "export",
    "inspect",
    "load",
    "models",
    "remap_optimizer",
    "save",
    "verify",
]

_NAMES = {
    "costs": ("Cost", "cost"),
    "cut": ("PrunePlan", "apply_plan", "load", "remap_optimizer", "save", "verify"),
    "cut.selection": ("Inspection", "inspect"),
    "methods.distillation": ("distillation_loss",),
    "errors": ("SoftpruneError",),
    "masks": ("MaskConfig",),
    "methods": ("Pruner", "SoftPruner", "Summary"),
}
_DEFINED_IN = {name: module for module, names in _NAMES.items() for name in names}

if not TYPE_CHECKING:  # with a module-level __getattr__, type checkers would accept any name

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
