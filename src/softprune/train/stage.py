"""A network in training: with its pruner, optimizer, average of weights and step.

A run has one stage, and a new one after each physical cut.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from softprune.config.settings import RunConfig
from softprune.data import DataBundle
from softprune.data.batches import make_batches
from softprune.data.sampler import EpochSampler
from softprune.distributed import World
from softprune.methods import Pruner
from softprune.methods.optimizer_hooks import undecayed_biases
from softprune.module_state import evaluating
from softprune.train.ema import WeightAverage
from softprune.train.method import make_pruner
from softprune.train.optim import make_sgd
from softprune.train.schedule import Schedule
from softprune.train.step import StepOptions, TrainStep


@dataclass(frozen=True, kw_only=True)
class LateSchedule(Schedule):
    """A schedule that begins at step ``start`` of the run."""

    start: int = 0

    def __call__(self, step: int) -> float:
        return super().__call__(step - self.start)


class Stage:
    """Everything that training changes, from one cut to the next.

    Args:
        config: The run's configuration.
        network: The network, on the world's device.
        data: The images.
        world: The processes that train.
        finetune: Whether this is the compact network's fine-tuning, which has no pruner.
        state: What :meth:`state_dict` returned, to go on from; ``network`` has its weights already.
        momentum: Optimizer state by parameter name, carried over a cut.
        clock: The pruner's clock, carried over a cut.
        round_to: The multiple that `method.round_to = "auto"` has found, carried over a cut.
    """

    def __init__(
        self,
        config: RunConfig,
        network: nn.Module,
        data: DataBundle,
        world: World,
        *,
        finetune: bool = False,
        state: dict[str, Any] | None = None,
        momentum: dict[str, dict[str, Tensor]] | None = None,
        clock: dict[str, int] | None = None,
        round_to: int | None = None,
    ) -> None:
        self.network, self.world = network, world
        if config.train.channels_last:
            # It gives the weights new places, which the optimizer and the average must follow from the start.
            network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.pruner: Pruner | None = None
        if not finetune and config.method.name != "dense":
            self.pruner = self._make_pruner(config, data, round_to if state is None else _multiple(state))
            self.pruner.updates_on_step = False  # a recorded step has no host; the loop updates
            if clock is not None:
                self.pruner.clock.load_state_dict(clock)
        if state is not None and self.pruner is not None:
            self.pruner.load_state_dict(state["pruner"])
        self.optimizer = _make_optimizer(config, network, self.pruner, finetune)
        _load_momentum(self.optimizer, network, momentum if state is None else state["optimizer"])
        if self.pruner is not None:
            self.pruner.attach(self.optimizer)
        self.average = WeightAverage(network, config.train.ema) if config.train.ema else None
        if state is not None and self.average is not None:
            self.average.load_state_dict(state["average"])
        self.step = self._make_step(config, data, finetune)
        if state is not None:
            totals = state["step"] if world.is_writer else {**state["step"], "totals": [0.0] * 4}
            self.step.load_state_dict(totals)

    def _make_pruner(self, config: RunConfig, data: DataBundle, multiple: int | None) -> Pruner:
        """The run's pruner; what "auto" means is found once in a run, and by the first process alone."""
        method = config.method
        seeks = method.round_to == "auto" and multiple is None
        if seeks and not self.world.is_writer:
            multiple = self.world.broadcast(0)
        if method.round_to == "auto" and multiple is not None:
            method = method.replace(round_to=multiple)
        pruner = make_pruner(
            method,
            self.network,
            data.example(device=self.world.device),
            masks=config.masks,
            seed=config.seed,
            total_steps=config.train.epochs * _sampler(config, data, self.world).steps,
        )
        if seeks and self.world.is_writer:
            self.world.broadcast(pruner.round_to)
        return pruner

    def _make_step(self, config: RunConfig, data: DataBundle, finetune: bool) -> TrainStep:
        sampler = _sampler(config, data, self.world)
        feed = make_batches(
            data,
            sampler,
            device=self.world.device,
            pieces=config.train.accumulate,
            workers=config.data.workers,
        )
        strength = None
        if self.pruner is not None and self.pruner.penalised and not config.method.target:
            warmup = round(config.method.strength_warmup_epochs * sampler.steps)
            strength = Schedule(base=config.method.strength, warmup_steps=warmup)
        return TrainStep(
            self.world.wrap(self.network),
            self.optimizer,
            feed,
            schedule=learning_rate(config, sampler.steps, finetune),
            pruner=self.pruner,
            strength=strength,
            average=self.average,
            options=StepOptions(
                mode=config.train.mode,
                bf16=config.train.precision == "bf16",
                channels_last=config.train.channels_last,
                label_smoothing=config.train.label_smoothing,
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything to go on from, but for the network's weights. All processes must call it together."""
        self.step.check()
        step = self.step.state_dict()
        # Each process has summed over its share of the images; the checkpoint holds what all have seen.
        sums = torch.tensor(step["totals"], dtype=torch.float64, device=self.world.device)
        step["totals"] = self.world.sum_(sums).tolist()
        return {
            "pruner": None if self.pruner is None else self.pruner.state_dict(),
            "optimizer": optimizer_state(self.optimizer, self.network),
            "average": None if self.average is None else self.average.state_dict(),
            "step": step,
        }

    @contextmanager
    def judged(self) -> Iterator[nn.Module]:
        """The network as it is judged and cut: in eval mode, with the averaged weights where there are some."""
        applied = nullcontext() if self.average is None else self.average.applied()
        with evaluating(self.network), applied:
            yield self.network


def _multiple(state: dict[str, Any]) -> int | None:
    """The multiple of widths that a checkpoint's pruner had; an older one does not say."""
    return state["pruner"].get("round_to")


def _sampler(config: RunConfig, data: DataBundle, world: World) -> EpochSampler:
    return EpochSampler(
        size=len(data.train),
        batch_size=config.data.batch_size,
        seed=config.seed,
        rank=world.rank,
        world_size=world.size,
    )


def learning_rate(config: RunConfig, steps: int, finetune: bool = False) -> Schedule:
    """The learning rate of every step of the run, or of its fine-tuning."""
    if finetune:
        return LateSchedule(
            start=config.train.epochs * steps,
            base=config.finetune.lr,
            kind=config.finetune.schedule,
            milestones=tuple(epoch * steps for epoch in config.finetune.milestones),
            total_steps=config.finetune.epochs * steps,
        )
    schedule = config.schedule
    return Schedule(
        base=config.optimizer.lr,
        kind=schedule.kind,
        milestones=tuple(epoch * steps for epoch in schedule.milestones),
        factor=schedule.factor,
        final=schedule.final,
        total_steps=config.train.epochs * steps,
        warmup_steps=round(schedule.warmup_epochs * steps),
    )


def optimizer_state(optimizer: torch.optim.Optimizer, network: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Momentum and the like by parameter name, so that it survives another order of the parameters."""
    return {
        name: {key: value for key, value in optimizer.state[parameter].items() if isinstance(value, Tensor)}
        for name, parameter in _named(optimizer, network).items()
        if parameter in optimizer.state
    }


def _named(optimizer: torch.optim.Optimizer, network: nn.Module) -> dict[str, Tensor]:
    """The optimizer's parameters by name; a method's own, which the network does not know, by number."""
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own = (f"method.{number}" for number in range(len(parameters)))
    return {names[id(p)] if id(p) in names else next(own): p for p in parameters}


def _make_optimizer(
    config: RunConfig, network: nn.Module, pruner: Pruner | None, finetune: bool
) -> torch.optim.Optimizer:
    decay = config.optimizer.weight_decay
    groups = (
        undecayed_biases(network, decay) if pruner is None else pruner.parameter_groups(weight_decay=decay)
    )
    return make_sgd(
        groups,
        lr=config.finetune.lr if finetune else config.optimizer.lr,
        momentum=config.optimizer.momentum,
        nesterov=config.optimizer.nesterov,
    )


@torch.no_grad()
def _load_momentum(
    optimizer: torch.optim.Optimizer, network: nn.Module, state: dict[str, dict[str, Tensor]] | None
) -> None:
    parameters = _named(optimizer, network)
    for name, values in (state or {}).items():
        for key, value in values.items():
            optimizer.state[parameters[name]][key].copy_(value)
