"""Load a factory of the user's own, named as ``module:factory``."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from softprune.errors import ConfigError, first_line, nearest


def is_factory_name(name: str) -> bool:
    """Return whether ``name`` reads as ``module:factory``. Imports nothing."""
    module, colon, factory = name.partition(":")
    return bool(colon and factory and "/" not in name and all(module.split(".")))


def import_factory(name: str, key: str) -> Callable[..., Any]:
    """Import the factory ``name``, also from the current folder, for the setting ``key``."""
    module_name, _, factory_name = name.partition(":")
    # A console script does not search the current folder, where the user's module is.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing a module runs its code, which may raise anything
        raise ConfigError(
            f"{key} = 'module:factory' must be importable from here. Got {name!r}: {type(error).__name__}: "
            f"{first_line(error)}. `python -c 'import {module_name}'` shows where it fails."
        ) from error
    try:
        return getattr(module, factory_name)
    except AttributeError as error:
        raise ConfigError(
            f"{key} = 'module:factory' must name something in the module. Got {name!r}, and {module_name} has no "
            f"{factory_name!r}.{nearest(factory_name, dir(module))}"
        ) from error
