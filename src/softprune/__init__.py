"""softprune: channels that learn to be silent while a network trains, then are cut out for good.

pruner = softprune.SoftPruner(model, example, strength=1e-4)
...
loss = pruner.loss(task_loss)   # the one changed line of your loop
...
small = pruner.compact()        # an ordinary, smaller nn.Module, verified equal
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

# What `import softprune` alone gives.
_ROOMS = (
    "bench",
    "budget",
    "data",
    "errors",
    "export",
    "files",
    "finite",
    "graph",
    "inspection",
    "masks",
    "methods",
    "models",
    "plan",
    "surgery",
)
_ROOM_OF = {
    "Cost": "cost",
    "Inspection": "inspection",
    "MaskConfig": "masks",
    "PrunePlan": "plan",
    "Pruner": "methods",
    "SoftPruner": "methods",
    "SoftpruneError": "errors",
    "Summary": "methods",
    "apply_plan": "surgery",
    "cost": "cost",
    "inspect": "inspection",
    "load": "surgery",
    "remap_optimizer": "surgery",
    "save": "surgery",
    "verify": "surgery",
}


class _Softprune(ModuleType):
    """This module, which imports a name when it is first asked for: `softprune --help` does not wait for PyTorch.

    A class and not a function `__getattr__` of the module: that would let type checkers accept any name.
    """

    def __getattr__(self, name: str) -> Any:
        if name in _ROOMS:
            return importlib.import_module(f"softprune.{name}")
        if name not in _ROOM_OF:
            raise AttributeError(f"module 'softprune' has no attribute {name!r}", name=name, obj=self)
        value = getattr(importlib.import_module(f"softprune.{_ROOM_OF[name]}"), name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # Python puts the room `cost` here once anything imports it; `softprune.cost` is the function.
        super().__setattr__(name, value.cost if name == "cost" and isinstance(value, ModuleType) else value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Softprune
