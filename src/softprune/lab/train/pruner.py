"""The pruner of a run, from its configuration."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from softprune.budget import TableLike
from softprune.budget.measures import MEASURES
from softprune.errors import ConfigError, nearest, show
from softprune.factories import check_name, import_factory
from softprune.lab.config.method import MethodConfig
from softprune.lab.config.settings import RunConfig
from softprune.masks import MaskConfig
from softprune.methods import REGISTRY, OneShotPruner, Pruner
from softprune.methods.options import keywords_of

RECIPE_KEYS = {
    **{name: f"method.{name}" for name in MethodConfig.model_fields},
    "masks": "the table [masks], as in masks.delta",
    "seed": "seed",
    "total_steps": "train.epochs",
}
"""Keyword of a pruner -> its key in recipes, where it has one; all others are a method's options."""


def options_of(pruner: type[Pruner]) -> tuple[str, ...]:
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
        if option in RECIPE_KEYS:
            raise ConfigError(
                f"method.options must be options of {config.name}. Got {option!r}, which has a key of its own: use "
                f"{RECIPE_KEYS[option]}."
            )
        if option not in own:
            raise ConfigError(
                f"method.options must be options of {config.name}: {', '.join(own) or 'it has none'}. "
                f"Got {option!r}.{nearest(option, own)}"
            )


def check_latency_table(config: MethodConfig) -> None:
    """Raise a ConfigError if a new run would ignore its table. Older runs that did can be read and resumed."""
    if config.latency_table and "latency" not in config.target:
        raise ConfigError(
            f"method.latency_table needs a target of latency. Got latency_table = {show(config.latency_table)} and "
            f"target = {show(config.target)}; set method.target.latency, or leave it out."
        )
    if config.latency_table and config.latency_batch != 1:
        raise ConfigError(
            "method.latency_batch and method.latency_table exclude each other: a table is of one batch size. Got "
            f"latency_batch = {config.latency_batch} and a table; leave one of them out."
        )


def check_one_shot(config: RunConfig) -> None:
    """Raise a ConfigError if a run without training epochs has nothing trained, nothing to tune, or another method."""
    if config.train.epochs:
        return
    if config.method.name == "dense" or not issubclass(find_method(config.method.name), OneShotPruner):
        able = _able(lambda each: issubclass(each, OneShotPruner))
        raise ConfigError(
            f"train.epochs = 0 needs a method that ranks the channels of a trained network: {able}. Got "
            f"{config.method.name}; choose one of them, or train."
        )
    if not (config.model.weights or config.model.pretrained):
        raise ConfigError(
            "train.epochs = 0 needs a trained network. Got random weights; set model.weights to a file or the folder "
            "of a run, or model.pretrained = true."
        )
    if not config.finetune.epochs:
        raise ConfigError(
            "train.epochs = 0 needs finetune.epochs of at least 1: a run is measured after its epochs. Got 0; set it."
        )
    if config.train.dense_baseline and not config.train.dense_epochs:
        raise ConfigError(
            "With train.epochs = 0, train.dense_baseline needs train.dense_epochs. Got 0; set it, or set "
            "train.dense_baseline = false: the weights that the run starts from are tested as its baseline."
        )


def make_pruner(
    run: RunConfig, network: nn.Module, example: Tensor, *, total_steps: int, latency_table: TableLike | None = None
) -> Pruner:
    """Return the pruner of the method that a run names, for ``total_steps`` steps of training ``network``.

    Strength, masks and the other settings go to the methods that have them. A target replaces the strength.
    ``latency_table`` is what the run measured when it began.
    """
    config = run.method
    check_method(config)
    method = find_method(config.name)
    keywords = keywords_of(method)
    budget: dict[str, Any] = {"target": config.target, "total_steps": total_steps, "final_at": config.final_at}
    if any(MEASURES[key].is_timed for key in config.target):
        table = latency_table or config.latency_table
        budget |= {"latency_table": table} if table else {"latency_batch": config.latency_batch}
    adjusts = config.target and "total_steps" in keywords
    settings: dict[str, Any] = {
        **(budget if config.target else {}),
        **({} if adjusts else {"strength": config.strength}),
        "cost_weighting": config.cost_weighting,
        "masks": MaskConfig(**vars(run.masks)),
        "include": config.include or None,
        "exclude": config.exclude or None,
        "round_to": config.round_to,
        "min_channels": config.min_channels,
        "seed": run.seed,
    }
    known = {key: value for key, value in settings.items() if key in keywords}
    return method(network, example, **{**known, **config.options})
