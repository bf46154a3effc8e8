"""A network in training, with its pruner, optimizer and step. A run has one stage, and a new one after each cut."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from softprune.cut import PrunePlan, apply_plan
from softprune.lab.config.settings import RunConfig
from softprune.lab.data import DataBundle, EpochSampler, Mixing, make_batches
from softprune.lab.runs.checkpoint import random_state, restoring
from softprune.lab.runs.networks import build_network, check_outputs, check_training_outputs, starting_network
from softprune.lab.train.optim import learning_rate, load_optimizer_state, make_adamw, make_sgd, optimizer_state
from softprune.lab.train.pruner import make_pruner
from softprune.lab.train.step import StepOptions, TrainStep
from softprune.lab.train.teacher import Teacher
from softprune.lab.world import World
from softprune.methods import Pruner
from softprune.methods.pruner import undecayed_biases


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
        train = config.train
        network = network.to(world.device)
        unused = world.unused_parameters(network, data.example(device=world.device))
        if train.sync_batchnorm and world.size > 1 and world.device.type == "cuda":
            network = nn.SyncBatchNorm.convert_sync_batchnorm(network)
        if train.channels_last:
            # It replaces the weights' storage, so it comes before the optimizer.
            network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.network, self.world = network, world
        sampler = EpochSampler(
            size=len(data.train),
            batch_size=config.data.batch_size,
            seed=config.seed,
            rank=world.rank,
            world_size=world.size,
        )
        self.pruner: Pruner | None = None
        if not finetune and config.method.name != "dense":
            self.pruner = self._make_pruner(config, data, train.epochs * sampler.steps, state, before)
        self.optimizer = _make_optimizer(config, network, self.pruner)
        if before is not None:
            load_optimizer_state(self.optimizer, network, optimizer_state(before.optimizer, network))
        if state is not None:
            load_optimizer_state(self.optimizer, network, state["optimizer"])
        if self.pruner is not None:
            self.pruner.attach(self.optimizer)
        self.step = TrainStep(
            world.wrap(network, unused),
            self.optimizer,
            make_batches(data, sampler, device=world.device, workers=config.data.workers),
            schedule=learning_rate(config, sampler.steps, finetune),
            pruner=self.pruner,
            teacher=teacher,
            options=StepOptions(
                mode=train.mode,
                bf16=train.precision == "bf16",
                channels_last=train.channels_last,
                label_smoothing=train.label_smoothing,
                mixing=Mixing(mixup=config.data.mixup, cutmix=config.data.cutmix),
            ),
        )
        if state is not None:
            self.step.load_state_dict(state["step"], has_totals=world.is_writer)

    def _make_pruner(
        self,
        config: RunConfig,
        data: DataBundle,
        total_steps: int,
        state: dict[str, Any] | None,
        before: "Stage | None",
    ) -> Pruner:
        """Return the run's pruner. What it measures on the machine is measured once in a run."""
        saved = None if state is None else state["pruner"]
        earlier = None if before is None else before.pruner
        multiple = saved["round_to"] if saved is not None else earlier.round_to if earlier is not None else None
        if config.method.round_to == "auto" and multiple is not None:
            config = config.replace(method=config.method.replace(round_to=multiple))
        pruner = make_pruner(
            config,
            self.network,
            data.example(device=self.world.device),
            total_steps=total_steps,
            latency_table=saved.get("budget", {}).get("measure") if saved is not None else None,
        )
        pruner.updates_on_step = False  # a captured step runs no Python; the loop updates
        if earlier is not None:
            pruner.clock.load_state_dict(earlier.clock.state_dict())
        if saved is not None:
            pruner.load_state_dict(saved)
        return pruner

    def state_dict(self) -> dict[str, Any]:
        """Return everything to resume from except the network's weights. All processes must call it together."""
        self.step.check()
        return {
            "pruner": None if self.pruner is None else self.pruner.state_dict(),
            "optimizer": optimizer_state(self.optimizer, self.network),
            "step": self.step.state_dict(),
        }


@dataclass(frozen=True)
class StartingPoint:
    """What a Trainer starts from."""

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
    what = f"The network {config.model.name}"
    check_outputs(dense, data, what, "choose another model.name, data.name or image_size")
    check_training_outputs(copy.deepcopy(network), data, what)
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


def unsaved_buffers(network: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that are not in the state_dict (``persistent=False``): a checkpoint must hold them too."""
    saved = network.state_dict().keys()
    return {name: buffer.detach() for name, buffer in network.named_buffers() if name not in saved}


def _make_optimizer(config: RunConfig, network: nn.Module, pruner: Pruner | None) -> torch.optim.Optimizer:
    decay = config.optimizer.weight_decay
    groups = undecayed_biases(network, decay) if pruner is None else pruner.parameter_groups(weight_decay=decay)
    rate, momentum = config.optimizer.lr, config.optimizer.momentum  # the step sets the rate
    if config.optimizer.name == "adamw":
        return make_adamw(groups, lr=rate, beta=momentum)
    return make_sgd(groups, lr=rate, momentum=momentum, nesterov=config.optimizer.nesterov)
