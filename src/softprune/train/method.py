"""The pruner of a run, from its configuration."""

import inspect
from typing import Any

from torch import Tensor, nn

from softprune.errors import ConfigError
from softprune.masks import MaskConfig
from softprune.methods import REGISTRY, Pruner
from softprune.train.config import MethodConfig
from softprune.train.schema import nearest


def check_method(config: MethodConfig) -> None:
    """Raise a ConfigError unless ``config`` names a method and settings that it has."""
    if config.name == "dense":
        return
    if config.name not in REGISTRY:
        raise ConfigError(
            f"method.name must be one of {', '.join(REGISTRY)} or dense. Got {config.name!r}."
            f"{nearest(config.name, [*REGISTRY, 'dense'])}"
        )
    accepted = _settings(config)
    for option in config.options:
        if option not in accepted:
            raise ConfigError(
                f"method.options must be settings of {config.name}: {', '.join(accepted)}. Got {option!r}."
                f"{nearest(option, accepted)}"
            )


def make_pruner(
    config: MethodConfig, network: nn.Module, example: Tensor, *, masks: MaskConfig, seed: int
) -> Pruner:
    """The method that ``config`` names, at work on ``network``.

    Strength, masks and the like go to the methods that have them.
    """
    check_method(config)
    settings: dict[str, Any] = {
        "strength": config.strength,
        "masks": masks,
        "include": config.include or None,
        "exclude": config.exclude or None,
        "round_to": config.round_to,
        "min_channels": config.min_channels,
        "seed": seed,
    }
    known = {key: value for key, value in settings.items() if key in _settings(config)}
    return REGISTRY[config.name].build(network, example, **{**known, **config.options})


def _settings(config: MethodConfig) -> list[str]:
    """Keywords of the method's pruner, after the model and the example."""
    return list(inspect.signature(REGISTRY[config.name].build).parameters)[2:]
