"""The pruner of a run, from its configuration."""

import inspect
from typing import Any

from torch import Tensor, nn

from softprune.errors import ConfigError
from softprune.masks import MaskConfig
from softprune.methods import REGISTRY, Pruner
from softprune.train.config import MethodConfig
from softprune.train.schema import nearest


def make_pruner(
    config: MethodConfig, network: nn.Module, example: Tensor, *, masks: MaskConfig, seed: int
) -> Pruner:
    """The method that ``config`` names, at work on ``network``.

    Strength and masks go to the methods that have them; ``config.options`` must be keywords of the method.
    """
    if config.name not in REGISTRY:
        raise ConfigError(
            f"method.name must be one of {', '.join(REGISTRY)} or dense. Got {config.name!r}."
            f"{nearest(config.name, [*REGISTRY, 'dense'])}"
        )
    build = REGISTRY[config.name].build
    accepted = list(inspect.signature(build).parameters)
    for option in config.options:
        if option not in accepted:
            raise ConfigError(
                f"method.options must be settings of {config.name}: {', '.join(accepted[2:])}. Got {option!r}."
                f"{nearest(option, accepted)}"
            )
    settings: dict[str, Any] = {
        "strength": config.strength,
        "masks": masks,
        "include": config.include or None,
        "exclude": config.exclude or None,
        "round_to": config.round_to,
        "min_channels": config.min_channels,
        "seed": seed,
    }
    known = {key: value for key, value in settings.items() if key in accepted}
    return build(network, example, **{**known, **config.options})
