"""Find recipes and sweeps (TOML files) by name or path, read them, apply ``--set``, and write them."""

import copy
import itertools
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import tomli_w

from softprune.errors import ConfigError, first_few, nearest, show
from softprune.io import read_bytes
from softprune.lab.config.settings import BASELINE, PRUNING_SETTINGS, MethodConfig, RunConfig, keys_of, known_settings
from softprune.log import get_logger

logger = get_logger(__name__)

DEFAULT_RECIPE = "digits"
_KEYS = dict(keys_of(RunConfig))


def _shipped(folder: str) -> dict[str, Path]:
    files = Path(str(resources.files("softprune.lab"))) / folder
    return {path.stem: path for path in sorted(files.glob("*.toml"), key=lambda path: path.stem)}


RECIPES, SWEEPS = _shipped("recipes"), _shipped("sweeps")
"""Paths of the recipes and sweeps that come with softprune, by name."""


def title_of(file: Path) -> str:
    """Return the comment at the top of a recipe or sweep."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return " ".join(line.lstrip("# ") for line in itertools.takewhile(lambda line: line.startswith("#"), lines))


def find_file(name: str, shipped: Mapping[str, Path]) -> Path:
    """Return the path of a recipe or sweep. ``name`` is the path of a TOML file or a key of ``shipped``."""
    path = Path(name)
    if path.suffix == ".toml" and path.is_file():
        return path
    if name.removesuffix(".toml") in shipped:
        return shipped[name.removesuffix(".toml")]
    beside = [str(file) for file in path.parent.glob("*.toml")]
    raise ConfigError(
        "A recipe or sweep must be a TOML file or a name that `softprune recipes` lists. Got "
        f"{show(name)}, which is neither.{nearest(name, [*shipped, *beside])}"
    )


def load_recipe(recipe: str = DEFAULT_RECIPE, overrides: Iterable[str] = ()) -> RunConfig:
    """Return the validated configuration of a recipe, with ``key=value`` overrides applied."""
    path = find_file(recipe, RECIPES)
    return resolve_recipe(path, read_toml(path), map(parse_override, overrides))


def resolve_recipe(path: Path, values: dict[str, Any], overrides: Iterable[tuple[str, Any]] = ()) -> RunConfig:
    """Apply ``overrides`` to ``values``, the content of a recipe, in place, and return the validated configuration."""
    values.setdefault("name", path.stem)
    given: dict[str, Any] = {}
    for key, value in overrides:
        _set_key(values, key, value)
        _set_key(given, key, value)
    try:
        _choose_strength_or_target(values.get("method"), given.get("method", {}))
        _leave_out_pruning(values, given)
        if path == RECIPES[DEFAULT_RECIPE]:
            _leave_out_threads(values, given)
        return RunConfig(**values)
    except ConfigError as error:
        raise ConfigError(f"{path.name}: {error}") from error


def _choose_strength_or_target(method: Any, given: Mapping[str, Any]) -> None:
    """Let an override of target or strength replace the recipe's target or strength; a ratio replaces a target too."""
    if not isinstance(method, dict):
        return
    options = given.get("options")
    if given.get("target"):
        method["target"] = given["target"]
        if "strength" not in given:
            method.pop("strength", None)
    elif "strength" in given or (isinstance(options, dict) and {"ratio", "ratio_dist"} & options.keys()):
        method.pop("target", None)
    # The resolved configuration of a run with a target also contains the default strength.
    if method.get("target") and method.get("strength", MethodConfig().strength) != MethodConfig().strength:
        raise ConfigError(
            "method.strength and method.target exclude each other: a target controls the strength. Got strength = "
            f"{show(method['strength'])} and target = {show(method['target'])}; give one of them."
        )


def _leave_out_pruning(values: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Drop the recipe's pruning settings if ``method.name=dense`` is among the overrides."""
    if given.get("method", {}).get("name") != "dense":
        return
    for section, key in (setting.split(".") for setting in PRUNING_SETTINGS):
        if isinstance(values.get(section), dict) and key not in given.get(section, {}):
            values[section].pop(key, None)
    for section, key in (("model", "weights"), ("distill", "teacher")):
        if isinstance(values.get(section), dict) and values[section].get(key) == BASELINE:
            del values[section][key]


def _leave_out_threads(values: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Drop the default recipe's single thread if overrides replace its small network or data set."""
    another = any("name" in given.get(section, {}) for section in ("model", "data"))
    if another and "threads" not in given.get("train", {}):
        values["train"].pop("threads", None)


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file, or raise a ConfigError that names the faulty line."""
    try:
        return tomllib.loads(read_bytes(path).decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} must be a TOML file in UTF-8. Got an error reading it: {error}.") from error


def parse_override(override: str) -> tuple[str, Any]:
    """Split ``key=value`` and parse the value as TOML. Strings need no quotes."""
    key, equals, text = (part.strip() for part in override.partition("="))
    if not equals or not key:
        raise ConfigError(f"--set takes KEY=VALUE, such as optimizer.lr=0.05. Got {show(override)}.")
    is_text = _KEYS.get(key) is str
    if is_text and text[:1] not in ("'", '"'):
        return key, text
    try:
        values = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return key, text  # a string without quotes
    return key, values["value"] if len(values) == 1 else text


def _set_key(values: dict[str, Any], key: str, value: Any) -> None:
    if key in RunConfig.model_fields and isinstance(value, Mapping):  # update a section, do not replace it
        for name, each in value.items():
            _set_key(values, f"{key}.{name}", each)
        return
    *sections, name = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ConfigError(f"{section} must be a section, so that {key!r} can be set. Got {show(values)}.")
    values[name] = copy.deepcopy(value)  # a later override may change a key inside it


def config_to_dict(config: RunConfig) -> dict[str, Any]:
    """Return all settings, including defaults, as nested dictionaries of TOML and JSON types."""
    return config.model_dump(mode="json")


def flat_settings(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings in nested dictionaries by dotted key: ``{"train": {"epochs": 160}}`` -> ``train.epochs``."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat_settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def changed_settings(now: RunConfig, before: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return {key: (value now, value before)} of the settings that differ; None stands for a missing value."""
    here, there = (dict(flat_settings(config_to_dict(each))) for each in (now, before))
    values = {key: (here.get(key), there.get(key)) for key in {**here, **there}}
    return {key: pair for key, pair in values.items() if pair[0] != pair[1]}


def show_changes(changed: Mapping[str, tuple[Any, Any]]) -> str:
    """Format the result of :func:`changed_settings` for a message."""
    return first_few([f"{key} = {show(now)} instead of {show(before)}" for key, (now, before) in changed.items()])


def dump_config(config: RunConfig) -> str:
    """Return the resolved configuration as TOML."""
    return tomli_w.dumps(config_to_dict(config))


def read_config(path: Path) -> RunConfig:
    """Read the resolved configuration that a run wrote."""
    try:
        values = read_toml(path)
        known = known_settings(values)
        if known != values:
            unknown = dict(flat_settings(values)).keys() - dict(flat_settings(known))
            logger.warning("softprune: %s has settings of another version: %s", path, ", ".join(sorted(unknown)))
        return RunConfig(**known)
    except ConfigError as error:
        what = str(error) if str(path) in str(error) else f"{path}: {error}"
        raise ConfigError(
            f"{what} Restore the file as `softprune train` wrote it, or start a new run in another folder."
        ) from error
