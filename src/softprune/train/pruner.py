"""The pruner of a run, from its configuration."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from softprune.budget import TableLike
from softprune.budget.measures import MEASURES
from softprune.config.method import MethodConfig
from softprune.config.settings import RunConfig
from softprune.errors import ConfigError, nearest
from softprune.factories import check_name, import_factory
from softprune.masks import MaskConfig
from softprune.methods import REGISTRY, OneShotPruner, Pruner
from softprune.methods.options import RECIPE_KEYS, keywords_of, options_of


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


def check_one_shot(config: RunConfig) -> None:
    """Raise a ConfigError if a run without training epochs has no trained weights, or a method that must train."""
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


def make_pruner(
    config: MethodConfig,
    network: nn.Module,
    example: Tensor,
    *,
    masks: MaskConfig,
    seed: int,
    total_steps: int,
    latency_table: TableLike | None = None,
) -> Pruner:
    """Return the pruner of the method that ``config`` names, for ``total_steps`` steps of training ``network``.

    Strength, masks and the other settings go to the methods that have them. A target replaces the strength.
    ``latency_table`` is what the run measured when it began.
    """
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
        "masks": masks,
        "include": config.include or None,
        "exclude": config.exclude or None,
        "round_to": config.round_to,
        "min_channels": config.min_channels,
        "seed": seed,
    }
    known = {key: value for key, value in settings.items() if key in keywords}
    return method(network, example, **{**known, **config.options})
