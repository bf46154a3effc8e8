"""Load what softprune does not contain: factories of the user's own (``module:factory``) and optional packages."""

import importlib
import sys
from collections.abc import Callable, Collection
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
) -> None:
    """Raise an error unless ``name`` is in the registry or reads as ``module:factory``. Imports nothing."""
    if name not in registry and not is_factory_name(name):
        raise error(
            f"{key} must be one of {', '.join(registry)}, or {own} of your own. Got {name!r}."
            f"{nearest(name, registry) or _as_factory(name)}"
        )


def _as_factory(name: str) -> str:
    """Return a suggestion for the path of a file, or a dotted name, in place of ``module:factory``."""
    path, _, factory = name.rpartition(":" if ":" in name else ".")
    module = path.removeprefix("./").removesuffix(".py").replace("/", ".")
    meant = f"{module}:{factory}"
    return f" Did you mean {meant!r}?" if is_factory_name(meant) else ""


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


def import_optional(
    module: str, purpose: str, package: str = "", error: type[SoftpruneError] = ConfigError, otherwise: str = ""
) -> Any:
    """Import a module that only `purpose` needs, or raise an error that says which package to install."""
    package = package or module
    try:
        return importlib.import_module(module)
    except ImportError as problem:
        raise error(
            f"{purpose} needs the package {package}. Got {first_line(problem)!r}; install it with "
            f"`pip install {package}`{otherwise}."
        ) from problem
