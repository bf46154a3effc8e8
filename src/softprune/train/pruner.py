"""The pruner of a run, from its configuration."""

from typing import Any

from torch import Tensor, nn

from softprune.budget.measures import MEASURES
from softprune.config.method import MethodConfig
from softprune.config.settings import RunConfig
from softprune.errors import ConfigError, nearest
from softprune.masks import MaskConfig
from softprune.methods import REGISTRY, Pruner
from softprune.methods.ranking import OneShotPruner

# The recipe key of each keyword that every pruner may take.
_KEYS = {
    **{name: f"method.{name}" for name in MethodConfig.model_fields},
    "masks": "the table [masks], as in masks.delta",
    "seed": "seed",
    "total_steps": "train.epochs",
}


def check_method(config: MethodConfig, *, compact_at: int = 0) -> None:
    """Raise a ConfigError unless ``config`` names a method, options that it has, and features that it supports."""
    if config.name == "dense":
        return
    if config.name not in REGISTRY:
        raise ConfigError(
            f"method.name must be one of {', '.join(REGISTRY)} or dense. Got {config.name!r}."
            f"{nearest(config.name, [*REGISTRY, 'dense'])}"
        )
    if compact_at and not REGISTRY[config.name].continues:
        able = ", ".join(name for name, entry in REGISTRY.items() if entry.continues)
        raise ConfigError(
            f"train.compact_at needs a method that can continue after a cut: {able}. Got "
            f"{config.name}; use 0 to cut only at the end."
        )
    if config.target and "target" not in REGISTRY[config.name].keywords:
        able = ", ".join(name for name, entry in REGISTRY.items() if "target" in entry.keywords)
        raise ConfigError(f"method.target needs a method that can meet one: {able}. Got {config.name}.")
    for option in config.options:
        _check_option(config.name, option)


def _check_option(method: str, option: str) -> None:
    key = _KEYS.get(option)
    if key is not None:
        raise ConfigError(
            f"method.options must be options of {method}. Got {option!r}, which has a key of its own: use {key}."
        )
    own = REGISTRY[method].options
    if option not in own:
        raise ConfigError(
            f"method.options must be options of {method}: {', '.join(own) or 'it has none'}. "
            f"Got {option!r}.{nearest(option, own)}"
        )


def check_one_shot(config: RunConfig) -> None:
    """Raise a ConfigError if a run without training epochs has no trained weights, or a method that must train."""
    if config.train.epochs:
        return
    if config.method.name == "dense" or not issubclass(REGISTRY[config.method.name].build, OneShotPruner):
        able = ", ".join(name for name, entry in REGISTRY.items() if issubclass(entry.build, OneShotPruner))
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
    config: MethodConfig, network: nn.Module, example: Tensor, *, masks: MaskConfig, seed: int, total_steps: int
) -> Pruner:
    """Return the pruner of the method that ``config`` names, for ``total_steps`` steps of training ``network``.

    Strength, masks and the other settings go to the methods that have them. A target replaces the strength.
    """
    check_method(config)
    budget: dict[str, Any] = {"target": config.target, "total_steps": total_steps, "final_at": config.final_at}
    if any(MEASURES[key].is_timed for key in config.target):
        budget["latency_batch"] = config.latency_batch
    adjusts = config.target and "total_steps" in REGISTRY[config.name].keywords
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
    known = {key: value for key, value in settings.items() if key in REGISTRY[config.name].keywords}
    return REGISTRY[config.name].build(network, example, **{**known, **config.options})
