"""A network in training, with its pruner, optimizer, average of weights and step.

A run has one stage, and a new one after each physical cut.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from softprune.cut import PrunePlan, apply_plan
from softprune.distributed import World, broadcast_from_rank0_
from softprune.lab.config.settings import RunConfig
from softprune.lab.data import BatchSource, DataBundle, EpochSampler, make_batches
from softprune.lab.data.augment import Mixing
from softprune.lab.runs.checkpoint import random_state, restoring
from softprune.lab.runs.networks import build_network, check_outputs, check_training_outputs, starting_network
from softprune.lab.runs.resume import check_same_classes, load_unsaved_buffers
from softprune.lab.train.optim import (
    Schedule,
    WeightAverage,
    learning_rate,
    load_optimizer_state,
    make_adamw,
    make_sgd,
    optimizer_state,
)
from softprune.lab.train.pruner import make_pruner
from softprune.lab.train.step import StepOptions, TrainStep
from softprune.lab.train.teacher import Teacher
from softprune.masks import Clock
from softprune.methods import Pruner
from softprune.methods.optimizer_hooks import undecayed_biases
from softprune.module_state import evaluating


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
        self._unused = world.unused_parameters(network, data.example(device=world.device))
        if config.train.sync_batchnorm and world.size > 1 and world.device.type == "cuda":
            network = nn.SyncBatchNorm.convert_sync_batchnorm(network)
        if config.train.channels_last:
            # It replaces the weights' storage, so it comes before the optimizer and the average.
            network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.network, self.world = network, world
        self.sampler = EpochSampler(
            size=len(data.train),
            batch_size=config.data.batch_size,
            seed=config.seed,
            rank=world.rank,
            world_size=world.size,
            queue=config.data.sampling == "queue",
        )
        self.pruner: Pruner | None = None
        if not finetune and config.method.name != "dense":
            self.pruner = self._make_pruner(config, data, state, before)
        self.optimizer = _make_optimizer(config, network, self.pruner)
        if before is not None:
            load_optimizer_state(self.optimizer, network, optimizer_state(before.optimizer, network))
        if state is not None:
            load_optimizer_state(self.optimizer, network, state["optimizer"])
        if self.pruner is not None:
            self.pruner.attach(self.optimizer)
        self.average = WeightAverage(network, config.train.ema) if config.train.ema else None
        self.step = self._make_step(config, data, finetune)
        self.step.teacher = teacher
        if state is not None:
            if self.average is not None:
                self.average.load_state_dict(state["average"])
            totals = state["step"] if world.is_writer else {**state["step"], "totals": [0.0] * 4}
            self.step.load_state_dict(totals)

    def _make_pruner(
        self, config: RunConfig, data: DataBundle, state: dict[str, Any] | None, before: "Stage | None"
    ) -> Pruner:
        """Return the run's pruner. The meaning of round_to = "auto" is found once in a run."""
        saved = None if state is None else state["pruner"]
        earlier = None if before is None else before.pruner
        multiple = saved["round_to"] if saved is not None else earlier.round_to if earlier is not None else None
        if config.method.round_to == "auto" and multiple is not None:
            config = config.replace(method=config.method.replace(round_to=multiple))
        pruner = make_pruner(
            config,
            self.network,
            data.example(device=self.world.device),
            total_steps=config.train.epochs * self.sampler.steps,
            # A latency target may be out of reach by a measurement of this machine.
            latency_table=saved.get("budget", {}).get("measure") if saved is not None else None,
        )
        pruner.updates_on_step = False  # a captured step runs no Python; the loop updates
        if earlier is not None:
            pruner.clock.load_state_dict(earlier.clock.state_dict())
        if saved is not None:
            pruner.load_state_dict(saved)
        return pruner

    def _make_step(self, config: RunConfig, data: DataBundle, finetune: bool) -> TrainStep:
        steps, accumulate, workers = self.sampler.steps, config.train.accumulate, config.data.workers
        strength = None
        if self.pruner is not None and self.pruner.penalised and not config.method.target:
            warmup = round(config.method.strength_warmup_epochs * steps)
            strength = Schedule(base=config.method.strength, warmup_steps=warmup)
        return TrainStep(
            self.world.wrap(self.network, self._unused),
            self.optimizer,
            make_batches(data, self.sampler, device=self.world.device, accumulate=accumulate, workers=workers),
            schedule=learning_rate(config, steps, finetune),
            pruner=self.pruner,
            strength=strength,
            average=self.average,
            options=StepOptions(
                mode=config.train.mode,
                bf16=config.train.precision == "bf16",
                channels_last=config.train.channels_last,
                label_smoothing=config.train.label_smoothing,
                mixing=Mixing(mixup=config.data.mixup, cutmix=config.data.cutmix),
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return everything to resume from except the network's weights. All processes must call it together."""
        self.step.check()
        step = self.step.state_dict()
        # Each process has summed over its share of the images; the checkpoint holds the sum over all.
        sums = torch.tensor(step["totals"], dtype=torch.float64, device=self.world.device)
        step["totals"] = self.world.sum_(sums).tolist()
        return {
            "pruner": None if self.pruner is None else self.pruner.state_dict(),
            "optimizer": optimizer_state(self.optimizer, self.network),
            "average": None if self.average is None else self.average.state_dict(),
            "step": step,
        }

    @contextmanager
    def eval_weights(self) -> Iterator[nn.Module]:
        """Yield the network that is evaluated and cut: in eval mode, with the averaged weights if there are any."""
        applied = nullcontext() if self.average is None else self.average.applied()
        with evaluating(self.network), applied:
            yield self.network

    def strength(self, step: int) -> float | None:
        """Return the sparsity strength in a step: as scheduled or, with a target, the current one."""
        if self.step.strength is not None:
            return self.step.strength(step)
        return None if self.pruner is None or not self.pruner.penalised else float(self.pruner.strength)


@dataclass(frozen=True)
class StartingPoint:
    """What a Trainer starts from."""

    dense: nn.Module
    """The network before any cut, on the CPU; only its structure is used."""
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
    with restoring():
        check_same_classes(data, state)
    dense = build_network(config.model.name, data.num_classes, config.model.options)
    with restoring():
        network = copy.deepcopy(dense)
        for plan in state["cuts"]:
            network = apply_plan(PrunePlan.from_json(plan), network)
        network.load_state_dict(state["model"])
        load_unsaved_buffers(network, state["unsaved_buffers"])
        # Two kinds of stage have no pruner: fine-tuning after a cut, and a dense run, which is never fine-tuned.
        finetune = state["stage"]["pruner"] is None and config.method.name != "dense"
        stage = Stage(config, network, data, world, finetune=finetune, cut=bool(state["cuts"]), state=state["stage"])
        return StartingPoint(dense, stage, state["random"])


@torch.no_grad()
def recalibrate(network: nn.Module, batches: BatchSource, count: int) -> None:
    """Set every BatchNorm's running statistics to their mean over ``count`` training batches, in place.

    While masks are random, each layer collects its statistics under upstream masks that were drawn, not decided. The
    compact network needs those of the masks that were decided. Several processes must call this together: each
    computes its share of the batches, and all take the statistics of rank 0, as in training.
    """
    norms = [module for module in network.modules() if isinstance(module, _BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    clock = Clock(batches.sampler.seed, batches.device)
    try:
        with evaluating(network):
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = None  # the cumulative mean
                norm.train()
            for number in range(count):
                epoch, position = divmod(number, batches.sampler.steps)
                if position == 0:
                    batches.begin(epoch, 0)
                batches.before_step()
                for first, second in batches.micro_batches(torch.tensor([position], device=batches.device)):
                    network(batches.batch(first, second, clock)[0])
                clock.end_step()
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
    broadcast_from_rank0_(*(buffer for norm in norms for buffer in norm.buffers()))


def _make_optimizer(config: RunConfig, network: nn.Module, pruner: Pruner | None) -> torch.optim.Optimizer:
    decay = config.optimizer.weight_decay
    groups = undecayed_biases(network, decay) if pruner is None else pruner.parameter_groups(weight_decay=decay)
    rate, momentum = config.optimizer.lr, config.optimizer.momentum  # the step sets the rate
    if config.optimizer.name == "adamw":
        return make_adamw(groups, lr=rate, beta=momentum)
    return make_sgd(groups, lr=rate, momentum=momentum, nesterov=config.optimizer.nesterov)
