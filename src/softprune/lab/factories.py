"""User-defined networks, data sets and methods, which a recipe names as ``module:factory``."""

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from softprune.errors import ConfigError, SoftpruneError, first_line, nearest


def is_factory_name(name: str) -> bool:
    """Return whether ``name`` has the form ``module:factory``. Imports nothing."""
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
    """Raise ``error`` unless ``name`` is in the registry or has the form ``module:factory``. Imports nothing.

    ``options`` are keyword arguments of a factory. They are rejected for names in the registry.
    """
    if name in registry and options:
        raise error(
            f"{key.partition('.')[0]}.options are for factories only ({key} = 'module:factory'). Got {options} for "
            f"{name!r}; remove them."
        )
    if name not in registry and not is_factory_name(name):
        raise error(
            f"{key} must be one of {', '.join(registry)}, or your own {own}. Got {name!r}.{nearest(name, registry)}"
        )


def import_factory(name: str, key: str) -> Callable[..., Any]:
    """Import and return the factory ``name`` of the setting ``key``. The current folder is searched first."""
    module_name, _, factory_name = name.partition(":")
    # Console scripts do not have the current folder on sys.path, but the user's module is usually there.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return getattr(importlib.import_module(module_name), factory_name)
    except Exception as error:  # importing a module runs its code, which may raise anything
        raise ConfigError(
            f"{key} = 'module:factory' must be importable from here. Got {name!r}: {type(error).__name__}: "
            f"{first_line(error)}. `python -c 'import {module_name}'` shows whether the module can be imported."
        ) from error


def call_factory(
    name: str,
    key: str,
    options: Mapping[str, Any],
    offered: Mapping[str, Any] | None = None,
    error: type[SoftpruneError] = ConfigError,
) -> Any:
    """Call the factory ``name`` with ``options`` and with those of the ``offered`` arguments that it accepts."""
    factory = import_factory(name, key)
    given = {**(offered or {}), **options}
    try:
        parameters = inspect.signature(factory).parameters
        if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
            given = {word: value for word, value in given.items() if word in parameters or word in options}
        return factory(**given)
    except SoftpruneError:
        raise  # its message already says what to do
    except Exception as problem:  # user code may raise anything
        place = traceback.extract_tb(problem.__traceback__)[-1]
        call = f"{name}({', '.join(f'{word}={value!r}' for word, value in given.items())})"
        raise error(
            f"The factory of {key} must work with its arguments. Got {type(problem).__name__}: {first_line(problem)}, "
            f"raised in line {place.lineno} of {place.filename} by {call}."
        ) from problem
