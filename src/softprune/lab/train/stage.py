"""A network in training with its pruner, optimizer and step, made from a run's configuration.

A run has one stage, and a new one after each cut.
"""

import copy
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from softprune import models
from softprune.budget import TableLike
from softprune.cut import PrunePlan, apply_plan
from softprune.errors import ConfigError, SoftpruneError, nearest
from softprune.lab.config.settings import BASELINE, MethodConfig, RunConfig
from softprune.lab.data import DataBundle, EpochSampler, Mixing, load_data
from softprune.lab.factories import check_name, import_factory
from softprune.lab.runs.checkpoint import random_state, restoring
from softprune.lab.runs.folder import RunFolder
from softprune.lab.runs.networks import build_network, check_outputs, load_weights, read_weights, starting_network
from softprune.lab.train.step import (
    Teacher,
    TrainStep,
    learning_rate,
    load_optimizer_state,
    make_optimizer,
    optimizer_state,
)
from softprune.lab.world import World
from softprune.mask_config import MaskConfig
from softprune.methods import REGISTRY, Pruner, RankingPruner
from softprune.methods.options import keywords_of
from softprune.methods.pruner import undecayed_biases

# --- the data and the process ----------------------------------------------------------------------------------------


def open_data(
    config: RunConfig, device: torch.device, folder: str | None = None, *, in_memory: bool = True
) -> DataBundle:
    """Return the run's images, from ``folder`` if given, or from the configuration's folder.

    Commands that do not train pass ``in_memory=False``: images in files are decoded when they are used, if they are.
    """
    data = config.data
    return load_data(
        data.name,
        folder or data.dir or None,
        device=device,
        image_size=data.image_size,
        seed=config.seed,
        augment=data.augment,
        randaugment=data.randaugment,
        erasing=data.erasing,
        holdout=data.holdout,
        in_memory=data.in_memory and in_memory,
        workers=data.workers,
        options=data.options,
    )


def set_arithmetic(config: RunConfig, device: torch.device) -> None:
    """Set precision and determinism, which PyTorch keeps per process."""
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    tf32 = config.train.precision != "fp32"
    torch.backends.cudnn.allow_tf32 = tf32
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    if config.train.deterministic and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


# --- the pruner ------------------------------------------------------------------------------------------------------

RECIPE_KEYS = {
    **{name: f"method.{name}" for name in MethodConfig.model_fields},
    "masks": "the table [masks], as in masks.delta",
    "seed": "seed",
    "total_steps": "train.epochs",
}
"""Keyword of a pruner -> its key in recipes, where it has one; all others are a method's options."""

RARE = ("include", "min_channels", "latency_batch")
"""Keywords of every pruner that a recipe can give as `method.options`."""


def options_of(pruner: type) -> tuple[str, ...]:
    """Return the names of the settings that only this method has: `method.options` of a recipe."""
    return tuple(name for name in keywords_of(pruner) if name not in RECIPE_KEYS and name not in RARE)


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


def check_method(run: RunConfig) -> None:
    """Raise a ConfigError unless a run names a method, options that it has, and features that it supports."""
    config = run.method
    if config.name == "dense":
        return
    method = find_method(config.name)
    if run.train.compact_at and not method.continues:
        raise ConfigError(
            f"train.compact_at needs a method that can continue after a cut: {_able(lambda each: each.continues)}. Got "
            f"{config.name}; use 0 to cut only at the end."
        )
    if config.target and "target" not in keywords_of(method):
        able = _able(lambda each: "target" in keywords_of(each))
        raise ConfigError(f"method.target needs a method that can meet one: {able}. Got {config.name}.")
    own = options_of(method)
    for option in config.options:
        if option not in (*own, *RARE):
            hint = f" Use {RECIPE_KEYS[option]}." if option in RECIPE_KEYS else nearest(option, own)
            raise ConfigError(
                f"method.options must be options of {config.name}: {', '.join(own) or 'it has none'}. "
                f"Got {option!r}.{hint}"
            )


def check_one_shot(run: RunConfig) -> None:
    """Raise a ConfigError if a run without training epochs has nothing trained, nothing to tune, or another method."""
    if run.train.epochs:
        return
    if run.method.name == "dense" or not _ranks_once(find_method(run.method.name)):
        found = f"method.name = {run.method.name}; it must rank channels of trained weights, as {_able(_ranks_once)} do"
    elif not (run.model.weights or run.model.pretrained):
        found = "random weights; set model.weights to a file or the folder of a run, or model.pretrained = true"
    elif not run.finetune.epochs:
        found = "finetune.epochs = 0; set it, since a run is measured after its epochs"
    elif run.train.dense_baseline and not run.train.dense_epochs:
        found = "train.dense_baseline without train.dense_epochs; set them, or leave the baseline out"
    else:
        return
    raise ConfigError(f"A run with train.epochs = 0 prunes trained weights at once and tunes the rest. Got {found}.")


def _able(supports: Callable[[type[Pruner]], bool]) -> str:
    return ", ".join(name for name, pruner in REGISTRY.items() if supports(pruner))


def _ranks_once(method: type[Pruner]) -> bool:
    return issubclass(method, RankingPruner) and method.once


def make_pruner(
    run: RunConfig, network: nn.Module, example: Tensor, *, total_steps: int, latency_table: TableLike | None = None
) -> Pruner:
    """Return the pruner of the method that a run names, for ``total_steps`` steps of training ``network``.

    Each setting of [method] goes to the methods that have a keyword of its name; empty ones are left out. A target
    replaces the strength. ``latency_table`` is what the run measured when it began.
    """
    config = run.method
    method = find_method(config.name)
    keywords = keywords_of(method)
    given: dict[str, Any] = {name: value for name, value in config if value not in ({}, (), "")}
    given |= {"masks": MaskConfig(**vars(run.masks)), "seed": run.seed, "total_steps": total_steps}
    timed = "latency" in config.target
    if timed and latency_table is not None:
        given["latency_table"] = latency_table
    if timed and "latency_table" not in given:
        given["latency_batch"] = 1
    unused = {"name", "options"}
    if not config.target:
        unused.add("total_steps")
    elif "total_steps" in keywords:
        unused.add("strength")
    if not timed:
        unused.add("latency_table")
    known = {key: value for key, value in given.items() if key in keywords and key not in unused}
    return method(network, example, **{**known, **config.options})


# --- the teacher -----------------------------------------------------------------------------------------------------


def load_teacher(config: RunConfig, folder: RunFolder | None, data: DataBundle, world: World) -> Teacher:
    """Load the teacher that ``config`` names. ``folder`` is the run's folder, for its dense baseline."""
    name = config.distill.teacher
    path = folder.dense if name == BASELINE and folder is not None else Path(name).expanduser()
    try:
        network = _teacher_network(path, config, data)
    except (SoftpruneError, RuntimeError) as error:
        raise ConfigError(
            f"distill.teacher must be a trained dense network for these classes: a finished dense run, or a file with "
            f"weights. Got {path}: {error} If the teacher of a run was moved, change the path in its config.toml."
        ) from error
    network = network.eval().requires_grad_(False).to(world.device)
    if config.train.channels_last:
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    check_outputs(network, data, f"distill.teacher, {path},", "name a network that was trained on this data set")
    digest = hashlib.sha256()
    for key, value in sorted(network.state_dict().items()):
        digest.update(key.encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return Teacher(network, config.distill.weight, config.distill.temperature, digest.hexdigest())


def _teacher_network(path: Path, config: RunConfig, data: DataBundle) -> nn.Module:
    """Return the network of a dense run, or one like that of ``config`` with the weights of a file."""
    run, model = RunFolder(path), config.model
    if run.config.is_file():
        other = run.read_config()
        if other.method.name != "dense" or not run.result.is_file():
            inside = f", whose dense baseline is {run.dense}" if run.dense.is_dir() else ""
            raise ConfigError(f"a run with method {other.method.name}{inside}, or one that is not finished.")
        # A run's folder is data: only factories that this run names itself are imported.
        if other.model.name not in (*models.REGISTRY, config.model.name):
            raise ConfigError(f"a run with model.name = {other.model.name!r}, which this run does not name.")
        model = other.model
    with torch.random.fork_rng(devices=[]):  # the run's own start must not depend on its teacher
        network = build_network(model.name, data.num_classes, model.options)
    if not load_weights(network, read_weights(path), str(path), data.num_classes):
        raise ConfigError(f"a network without a classifier for the {data.num_classes} classes of the run.")
    return network


# --- the stage -------------------------------------------------------------------------------------------------------


class Stage:
    """Everything that training changes, from one cut to the next.

    Args:
        finetune: Whether this is the fine-tuning of the compact network, which has no pruner.
        cut: Whether dead channels were removed before. The network then meets the run's target, if there is one.
        state: What :meth:`state_dict` returned, to resume from; ``network`` has its weights already.
        before: The stage of the uncut network, whose momentum, noise and multiple of widths this one continues with.
    """

    def __init__(
        self,
        config: RunConfig,
        network: nn.Module,
        data: DataBundle,
        world: World,
        *,
        finetune: bool = False,
        cut: bool = False,
        state: dict[str, Any] | None = None,
        before: "Stage | None" = None,
        teacher: Teacher | None = None,
    ) -> None:
        if cut and config.method.target:
            config = config.replace(method=config.method.replace(target={}, strength=0.0))
        network = network.to(world.device)
        example = data.example(device=world.device)
        unused = world.unused_parameters(network, example)
        if config.train.sync_batchnorm and world.size > 1 and world.device.type == "cuda":
            network = nn.SyncBatchNorm.convert_sync_batchnorm(network)
        if config.train.channels_last:
            # It replaces the weights' storage, so it comes before the optimizer.
            network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.network = network
        sampler = EpochSampler(len(data.train), config.data.batch_size, config.seed, world.rank, world.size)

        self.pruner: Pruner | None = None
        decay = config.optimizer.weight_decay
        if finetune or config.method.name == "dense":
            groups = undecayed_biases(network, decay)
        else:
            saved = None if state is None else state["pruner"]
            earlier = None if before is None else before.pruner
            self.pruner = _continued_pruner(
                config, network, example, config.train.epochs * sampler.steps, saved, earlier
            )
            groups = self.pruner.parameter_groups(weight_decay=decay)

        self.optimizer = make_optimizer(config.optimizer, groups)
        if before is not None:
            load_optimizer_state(self.optimizer, network, optimizer_state(before.optimizer, network))
        if state is not None:
            load_optimizer_state(self.optimizer, network, state["optimizer"])
        if self.pruner is not None:
            self.pruner.attach(self.optimizer)

        self.step = TrainStep(
            world.wrap(network, unused),
            self.optimizer,
            data.batches(sampler, world.device, config.data.workers),
            schedule=learning_rate(config, sampler.steps, finetune),
            train=config.train,
            pruner=self.pruner,
            teacher=teacher,
            mixing=Mixing(config.data.mixup, config.data.cutmix),
        )
        if state is not None:
            self.step.load_state_dict(state["step"], has_totals=world.is_writer)

    def state_dict(self) -> dict[str, Any]:
        """Return everything to resume from except the network's weights. All processes must call it together."""
        self.step.check()
        return {
            "pruner": None if self.pruner is None else self.pruner.state_dict(),
            "optimizer": optimizer_state(self.optimizer, self.network),
            "step": self.step.state_dict(),
        }


def _continued_pruner(
    config: RunConfig,
    network: nn.Module,
    example: Tensor,
    total_steps: int,
    saved: dict[str, Any] | None,
    earlier: Pruner | None,
) -> Pruner:
    """Return the pruner, with its ``saved`` state, or with the noise of the pruner of the uncut network.

    What it measures on the machine is measured once in a run.
    """
    multiple = saved["round_to"] if saved is not None else earlier.round_to if earlier is not None else None
    if config.method.round_to == "auto" and multiple is not None:
        config = config.replace(method=config.method.replace(round_to=multiple))
    table = None if saved is None else saved.get("budget", {}).get("table")
    pruner = make_pruner(config, network, example, total_steps=total_steps, latency_table=table)
    pruner.updates_on_step = False  # a captured step runs no Python; the loop updates
    if earlier is not None:
        pruner.clock.load_state_dict(earlier.clock.state_dict())
    if saved is not None:
        pruner.load_state_dict(saved)
    return pruner


@dataclass(frozen=True)
class StartingPoint:
    """What a run starts or resumes from."""

    dense: nn.Module
    """The network before any cut, on the CPU."""
    stage: Stage
    random: dict[str, Any]
    """State of the random generators for the first step."""
    is_trained: bool = False
    """Whether ``dense`` has the trained weights of an earlier run or a file, classifier included."""


def first_stage(config: RunConfig, data: DataBundle, world: World) -> StartingPoint:
    """Build the network and the pruner of a new run. Errors in either are raised here."""
    network, is_trained = starting_network(config.model, data.num_classes, config.seed)
    dense = copy.deepcopy(network)
    remedy = "choose another model.name, data.name or image_size"
    check_outputs(dense, data, f"The network {config.model.name}", remedy, training=True)
    stage = Stage(config, network, data, world)
    return StartingPoint(dense, stage, random_state(world.device), is_trained)


def restored_stage(config: RunConfig, data: DataBundle, world: World, state: dict[str, Any]) -> StartingPoint:
    """Build the stage of a checkpoint: the dense definition, its cuts, the weights, and all that training changes."""
    dense = build_network(config.model.name, data.num_classes, config.model.options)
    with restoring():
        network = copy.deepcopy(dense)
        for plan in state["history"]["cuts"]:
            network = apply_plan(PrunePlan.from_json(plan), network)
        network.load_state_dict(state["model"])
        buffers = dict(network.named_buffers())
        for name, value in state["unsaved_buffers"].items():
            buffers[name].copy_(value)
        # Two kinds of stage have no pruner: fine-tuning after a cut, and a dense run, which is never fine-tuned.
        finetune = state["stage"]["pruner"] is None and config.method.name != "dense"
        cut = bool(state["history"]["cuts"])
        stage = Stage(config, network, data, world, finetune=finetune, cut=cut, state=state["stage"])
        return StartingPoint(dense, stage, state["random"])
