"""Create the pruner and the teacher of a run from its configuration."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from softprune import models
from softprune.errors import ConfigError, SoftpruneError, nearest
from softprune.lab.config.settings import MethodConfig, RunConfig
from softprune.lab.data import DataBundle
from softprune.lab.factories import check_name, import_factory
from softprune.lab.runs.folder import RunFolder
from softprune.lab.runs.networks import build_network, check_outputs, load_weights, read_weights
from softprune.lab.train.step import Teacher, placed
from softprune.mask_config import MaskConfig
from softprune.methods import REGISTRY, Pruner, RankingPruner
from softprune.methods.options import keywords_of

# --- the pruner ------------------------------------------------------------------------------------------------------

NO_OPTIONS = {*MethodConfig.model_fields, "masks", "seed", "total_steps"}
"""Keywords of pruners that are settings of their own in recipes. All others are options of the method."""
RARE = ("include", "keep", "min_channels")
"""Keywords that every pruner accepts in `method.options`."""


def options_of(pruner: type) -> tuple[str, ...]:
    """Return the names of the method's own settings, for `method.options` of a recipe."""
    return tuple(name for name in keywords_of(pruner) if name not in NO_OPTIONS and name not in RARE)


def find_method(name: str) -> type[Pruner]:
    """Return the pruner class ``name``: a registry name, or ``module:Class``."""
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


def check_method(run: RunConfig) -> None:
    """Raise a ConfigError unless the method exists and supports the options and features that the run uses."""
    config = run.method
    _check_one_shot(run)
    if config.name == "dense":
        return
    method = find_method(config.name)
    if run.train.compact_at and not method.continues:
        raise ConfigError(
            f"train.compact_at needs a method that can continue after a cut: {_able(lambda each: each.continues)}. Got "
            f"{config.name}; set it to 0 to cut only at the end."
        )
    if config.target and "target" not in keywords_of(method):
        able = _able(lambda each: "target" in keywords_of(each))
        raise ConfigError(
            f"method.target needs a method that supports targets: {able}. Got {config.name}; set method.strength "
            "instead, or method.target={} for no target."
        )
    own = options_of(method)
    for option in config.options:
        if option not in (*own, *RARE):
            raise ConfigError(
                f"method.options must be options of {config.name}: {', '.join(own) or 'it has none'}. Got {option!r}."
                f"{nearest(option, own)}"
            )


def _check_one_shot(run: RunConfig) -> None:
    """Raise a ConfigError if a run with train.epochs = 0 lacks trained weights, fine-tuning, or a ranking method."""
    name, is_trained = run.method.name, bool(run.model.weights or run.model.pretrained)
    is_tuned = run.finetune.epochs and (run.train.dense_epochs or not run.train.dense_baseline)
    if not run.train.epochs and not (is_trained and is_tuned and name != "dense" and _ranks_once(find_method(name))):
        raise ConfigError(
            "A run with train.epochs = 0 prunes trained weights in one shot, then fine-tunes: it needs model.weights "
            "or model.pretrained, finetune.epochs (and train.dense_epochs for a baseline), and a method that ranks "
            f"channels of trained weights: {_able(_ranks_once)}. Got {name}, finetune.epochs = {run.finetune.epochs} "
            f"and {'trained' if is_trained else 'random'} weights."
        )


def _able(supports: Callable[[type[Pruner]], bool]) -> str:
    return ", ".join(name for name, pruner in REGISTRY.items() if supports(pruner))


def _ranks_once(method: type[Pruner]) -> bool:
    return issubclass(method, RankingPruner) and method.once


def make_pruner(
    run: RunConfig,
    network: nn.Module,
    example: Tensor,
    total_steps: int,
    saved: dict[str, Any] | None = None,
    earlier: Pruner | None = None,
) -> Pruner:
    """Return the run's pruner for ``total_steps`` training steps of ``network``.

    Non-empty settings of [method] are passed to methods with a keyword of that name. A target replaces the strength.
    What depends on the machine stays fixed in a run: a new pruner takes ``round_to = "auto"`` and the latency table
    from the ``saved`` state, or ``round_to`` from ``earlier``, the pruner before a cut, whose noise it continues.
    """
    config = run.method
    method = find_method(config.name)
    keywords = keywords_of(method)
    given: dict[str, Any] = {name: value for name, value in config if value not in ({}, (), "")}
    given |= {"masks": MaskConfig(**vars(run.masks)), "seed": run.seed}
    if config.round_to == "auto" and (saved is not None or earlier is not None):
        given["round_to"] = saved["round_to"] if saved is not None else earlier.round_to if earlier is not None else 1
    if config.target:
        given["total_steps"] = total_steps
        if "total_steps" in keywords:
            del given["strength"]
    if "latency" in config.target:
        measured = None if saved is None else saved.get("budget", {}).get("table")
        if measured is not None:
            given["latency_table"] = measured
        if "latency_table" not in given:
            example = example[:1]
    known = {key: value for key, value in given.items() if key in keywords and key not in ("name", "options")}
    pruner = method(network, example, **{**known, **config.options})
    pruner.updates_on_step = False  # a captured step runs no Python, so the loop calls update_strength
    if earlier is not None:
        pruner.clock.load_state_dict(earlier.clock.state_dict())
    if saved is not None:
        pruner.load_state_dict(saved)
    return pruner


# --- the teacher -----------------------------------------------------------------------------------------------------


def load_teacher(path: Path, config: RunConfig, data: DataBundle, device: torch.device) -> Teacher:
    """Load the teacher from the folder of a dense run, or from a file with weights for the run's own network."""
    run, model = RunFolder(path), config.model
    try:
        if run.config.is_file():
            other = run.read_config()
            model = other.model
            # Its config.toml may name any code. Import a factory only if this run names the same one.
            is_known = model.name in (*models.REGISTRY, config.model.name)
            if other.method.name != "dense" or not run.result.is_file() or not is_known:
                raise ConfigError(f"a run with method {other.method.name} and network {model.name}.")
        with torch.random.fork_rng(devices=[]):  # a teacher must not change the initial weights of the run
            network = build_network(model.name, data.num_classes, model.options)
        if not load_weights(network, read_weights(path), str(path), data.num_classes):
            raise ConfigError(f"a network without a classifier for the {data.num_classes} classes of the run.")
        check_outputs(network, data, "It", "name a network that was trained on this data set")
    except SoftpruneError as error:
        raise ConfigError(
            "distill.teacher must be a trained dense network for these classes: a finished dense run of a built-in "
            f"network or of this run's network, or a file with weights. Got {path}: {error} If the teacher was moved, "
            "change the path in the config.toml of the run."
        ) from error
    network = placed(network.eval().requires_grad_(False), device)
    return Teacher(network, config.distill.weight, config.distill.temperature)
