"""Factories of the user's own: networks, data sets and methods that a recipe names as ``module:factory``."""

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from softprune.errors import ConfigError, SoftpruneError, first_line, nearest


def is_factory_name(name: str) -> bool:
    """Return whether ``name`` reads as ``module:factory``. Imports nothing."""
    module, colon, factory = name.partition(":")
    return bool(colon and factory and "/" not in name and all(module.split(".")) and not module.endswith(".py"))


def check_name(
    key: str,
    name: str,
    registry: Collection[str],
    error: type[SoftpruneError] = ConfigError,
    own: str = "module:factory",
    options: Mapping[str, Any] | None = None,
) -> None:
    """Raise an error unless ``name`` is in the registry or reads as ``module:factory``. Imports nothing.

    ``options`` are arguments of a factory: what is in the registry takes none.
    """
    if name in registry and options:
        raise error(
            f"{key.partition('.')[0]}.options are arguments of a factory ({key} = 'module:factory'). Got {options} for "
            f"{name!r}; leave them out."
        )
    if name not in registry and not is_factory_name(name):
        raise error(
            f"{key} must be one of {', '.join(registry)}, or {own} of your own. Got {name!r}.{nearest(name, registry)}"
        )


def import_factory(name: str, key: str) -> Callable[..., Any]:
    """Import the factory ``name``, also from the current folder, for the setting ``key``."""
    module_name, _, factory_name = name.partition(":")
    # A console script does not search the current folder, where the user's module is.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return getattr(importlib.import_module(module_name), factory_name)
    except Exception as error:  # importing a module runs its code, which may raise anything
        raise ConfigError(
            f"{key} = 'module:factory' must be importable from here. Got {name!r}: {type(error).__name__}: "
            f"{first_line(error)}. `python -c 'import {module_name}'` shows whether its module is."
        ) from error


def call_factory(
    name: str,
    key: str,
    options: Mapping[str, Any],
    offered: Mapping[str, Any] | None = None,
    error: type[SoftpruneError] = ConfigError,
) -> Any:
    """Return what the factory ``name`` returns for ``options`` and those of the arguments ``offered`` that it takes."""
    factory = import_factory(name, key)
    given = {**(offered or {}), **options}
    try:
        parameters = inspect.signature(factory).parameters
        if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
            given = {word: value for word, value in given.items() if word in parameters or word in options}
        return factory(**given)
    except SoftpruneError:
        raise  # it has its own remedy
    except Exception as problem:  # code of the user's own may raise anything
        place = traceback.extract_tb(problem.__traceback__)[-1]
        call = f"{name}({', '.join(f'{word}={value!r}' for word, value in given.items())})"
        raise error(
            f"The factory of {key} must work with its arguments. Got {type(problem).__name__}: {first_line(problem)}, "
            f"raised in line {place.lineno} of {place.filename} by {call}."
        ) from problem
