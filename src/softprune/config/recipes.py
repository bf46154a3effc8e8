"""Recipes: TOML files that hold a run's differences from the defaults, found by name or by path."""

import dataclasses
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from softprune.config import toml
from softprune.config.schema import build, keys_of, unknown_key
from softprune.config.settings import MethodConfig, RunConfig
from softprune.config.shipped import recipe_folder, recipe_names
from softprune.errors import ConfigError, nearest

DEFAULT_RECIPE = "digits"


def find_recipe(recipe: str) -> Path:
    """The file that ``recipe`` means: a path to a TOML file, or the name of one that ships with softprune."""
    path = Path(recipe)
    if path.suffix == ".toml" and path.is_file():
        return path
    shipped = recipe_folder() / f"{path.stem if path.suffix == '.toml' else recipe}.toml"
    if shipped.is_file() and len(path.parts) == 1:
        return shipped
    here = [str(file) for file in path.parent.glob("*.toml")]
    hint = nearest(recipe, [*recipe_names(), *here])
    raise ConfigError(
        f"A recipe must be a TOML file or a name that `softprune recipes` lists. Got {recipe!r}, "
        f"which is neither.{hint}"
    )


def load_recipe(recipe: str = DEFAULT_RECIPE, overrides: Iterable[str] = ()) -> RunConfig:
    """The configuration of a recipe with ``key=value`` overrides applied, checked."""
    path = find_recipe(recipe)
    values = read_toml(path)
    values.setdefault("name", path.stem)
    given: dict[str, Any] = {}
    for override in overrides:
        set_key(values, override)
        set_key(given, override)
    try:
        _choose_strength_or_target(values.get("method"), given.get("method", {}))
        return build(RunConfig, values)
    except ConfigError as error:
        raise ConfigError(f"{path.name}: {error}") from error


def _choose_strength_or_target(method: Any, given: Mapping[str, Any]) -> None:
    """A target moves the strength by itself: whichever is given replaces what the recipe has of the two."""
    if not isinstance(method, dict):
        return
    if given.get("target"):
        method["target"] = given["target"]
    if not method.get("target") or "strength" not in method:
        return
    if "strength" in given and not given.get("target"):
        del method["target"]
    elif "strength" not in given and (given.get("target") or method["strength"] == MethodConfig().strength):
        del method["strength"]  # a run's resolved configuration has the default beside its target
    else:
        raise ConfigError(
            "method.strength and method.target exclude each other: a target moves the strength by itself. Got "
            f"strength = {method['strength']!r} and target = {method['target']!r}; give one of them."
        )


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file's content, or a ConfigError that says which line is not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} must be a TOML file. Got an error reading it: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path} must be a readable file. Got {error.strerror}.") from error


def set_key(values: dict[str, Any], override: str) -> None:
    """Apply one ``key=value`` (the value as in TOML; quotes around text may be left out) to nested
    ``values``."""
    key, equals, text = override.partition("=")
    key, text = key.strip(), text.strip()
    if not equals or not key:
        raise ConfigError(f"--set takes KEY=VALUE, such as optimizer.lr=0.05. Got {override!r}.")
    known = dict(keys_of(RunConfig))
    if key not in known and not key.startswith(("method.options.", "method.target.")):
        raise unknown_key(key, RunConfig)
    *sections, name = key.split(".")
    table = values
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{section} must be a section to set {key!r} in. Got {table!r}.")
    table[name] = _parse_value(text, known.get(key))


def _parse_value(text: str, annotation: Any) -> Any:
    if annotation is str and text[:1] not in ("'", '"'):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def config_to_dict(config: RunConfig) -> dict[str, Any]:
    """Every setting, also those left at their defaults, as nested dictionaries that TOML and JSON can
    hold."""
    return _plain(dataclasses.asdict(config))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def config_from_dict(values: Mapping[str, Any]) -> RunConfig:
    """The inverse of :func:`config_to_dict`, checked."""
    return build(RunConfig, values)


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as TOML."""
    return toml.dumps(config_to_dict(config))


def read_config(path: Path) -> RunConfig:
    """A resolved configuration from the file that a run wrote."""
    again = "Put the file back as `softprune train` wrote it, or start a new run in another folder."
    try:
        values = read_toml(path)
    except ConfigError as error:
        raise ConfigError(f"{str(error).rstrip('.')}. {again}") from error
    try:
        return build(RunConfig, values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error} {again}") from error
