"""The pruner of a run, from its configuration."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from softprune.budget import TableLike
from softprune.budget.measures import MEASURES
from softprune.errors import ConfigError, nearest
from softprune.lab.config.method import MethodConfig
from softprune.lab.config.settings import RunConfig
from softprune.lab.factories import check_name, import_factory
from softprune.mask_config import MaskConfig
from softprune.methods import REGISTRY, Pruner, RankingPruner
from softprune.methods.options import keywords_of

RECIPE_KEYS = {
    **{name: f"method.{name}" for name in MethodConfig.model_fields},
    "masks": "the table [masks], as in masks.delta",
    "seed": "seed",
    "total_steps": "train.epochs",
}
"""Keyword of a pruner -> its key in recipes, where it has one; all others are a method's options."""


def options_of(pruner: type) -> tuple[str, ...]:
    """Return the names of the settings that only this method has: `method.options` of a recipe."""
    return tuple(name for name in keywords_of(pruner) if name not in RECIPE_KEYS)


def find_method(name: str) -> type[Pruner]:
    """Return the pruner class that ``name`` means: a registry name, or ``module:Class``."""
    if name in REGISTRY:
        return REGISTRY[name]
    check_name("method.name", name, [*REGISTRY, "dense"], own="module:Class")
    found = import_factory(name, "method.name")
    if not isinstance(found, type) or not issubclass(found, Pruner) or not hasattr(found, "name"):
        raise ConfigError(
            "method.name = 'module:Class' must name a subclass of softprune.methods.Pruner that has a `name`. Got "
            f"{name!r}, which is {found!r}; docs/own-method.md has an example."
        )
    return found


def _able(supports: Callable[[type[Pruner]], bool]) -> str:
    return ", ".join(name for name, pruner in REGISTRY.items() if supports(pruner))


def check_method(config: MethodConfig, *, compact_at: int = 0) -> None:
    """Raise a ConfigError unless ``config`` names a method, options that it has, and features that it supports."""
    if config.name == "dense":
        return
    method = find_method(config.name)
    if compact_at and not method.continues:
        raise ConfigError(
            f"train.compact_at needs a method that can continue after a cut: {_able(lambda each: each.continues)}. Got "
            f"{config.name}; use 0 to cut only at the end."
        )
    if config.target and "target" not in keywords_of(method):
        able = _able(lambda each: "target" in keywords_of(each))
        raise ConfigError(f"method.target needs a method that can meet one: {able}. Got {config.name}.")
    own = options_of(method)
    for option in config.options:
        if option not in own:
            hint = f" Use {RECIPE_KEYS[option]}." if option in RECIPE_KEYS else nearest(option, own)
            raise ConfigError(
                f"method.options must be options of {config.name}: {', '.join(own) or 'it has none'}. "
                f"Got {option!r}.{hint}"
            )


def _ranks_once(method: type[Pruner]) -> bool:
    return issubclass(method, RankingPruner) and method.once


def check_one_shot(config: RunConfig) -> None:
    """Raise a ConfigError if a run without training epochs has nothing trained, nothing to tune, or another method."""
    if config.train.epochs:
        return
    if config.method.name == "dense" or not _ranks_once(find_method(config.method.name)):
        able = _able(_ranks_once)
        found = f"method.name = {config.method.name}; it must rank the channels of a trained network, as {able} do"
    elif not (config.model.weights or config.model.pretrained):
        found = "random weights; set model.weights to a file or the folder of a run, or model.pretrained = true"
    elif not config.finetune.epochs:
        found = "finetune.epochs = 0; set it, since a run is measured after its epochs"
    elif config.train.dense_baseline and not config.train.dense_epochs:
        found = "train.dense_baseline without train.dense_epochs; set them, or leave the baseline out"
    else:
        return
    raise ConfigError(f"A run with train.epochs = 0 prunes trained weights at once and tunes the rest. Got {found}.")


def make_pruner(
    run: RunConfig, network: nn.Module, example: Tensor, *, total_steps: int, latency_table: TableLike | None = None
) -> Pruner:
    """Return the pruner of the method that a run names, for ``total_steps`` steps of training ``network``.

    Each setting of [method] goes to the methods that have a keyword of its name; empty ones are left out. A target
    replaces the strength. ``latency_table`` is what the run measured when it began.
    """
    config = run.method
    check_method(config)
    method = find_method(config.name)
    keywords = keywords_of(method)
    given: dict[str, Any] = {name: value for name, value in config if value not in ({}, (), "")}
    given |= {"masks": MaskConfig(**vars(run.masks)), "seed": run.seed, "total_steps": total_steps}
    timed = any(MEASURES[key].is_timed for key in config.target)
    if timed and latency_table is not None:
        given["latency_table"] = latency_table
    unused = {"name", "options"}
    if not config.target:
        unused |= {"total_steps", "final_at"}
    elif "total_steps" in keywords:
        unused.add("strength")
    if not timed:
        unused |= {"latency_table", "latency_batch"}
    elif "latency_table" in given:
        unused.add("latency_batch")
    known = {key: value for key, value in given.items() if key in keywords and key not in unused}
    return method(network, example, **{**known, **config.options})
