"""The optimizer and its schedules, on the device so that a CUDA graph can hold them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from softprune.errors import ConfigError
from softprune.lab.config.settings import RunConfig


def make_sgd(
    groups: Iterable[dict[str, Any]], *, lr: float, momentum: float = 0.9, nesterov: bool = True
) -> torch.optim.SGD:
    """Make an SGD whose learning rate is one float32 tensor on the parameters' device, shared by all groups.

    The momentum starts at zero rather than at the first gradient. Without dampening this is the same, and it makes
    the first step like all others. The fused kernel is the one that reads the rate on the device.
    """
    groups, rate = _on_one_device(groups, lr)
    optimizer = torch.optim.SGD(groups, lr=rate, momentum=momentum, nesterov=nesterov, fused=True)
    share_rate(optimizer, rate)
    _make_state(optimizer, ("momentum_buffer",) if momentum else ())
    return optimizer


def make_adamw(groups: Iterable[dict[str, Any]], *, lr: float, beta: float = 0.9) -> torch.optim.AdamW:
    """Make an AdamW whose learning rate and step count are on the parameters' device."""
    groups, rate = _on_one_device(groups, lr)
    on_cuda = rate.device.type == "cuda"
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(beta, 0.999), fused=True, capturable=on_cuda)
    share_rate(optimizer, rate)
    _make_state(optimizer, ("exp_avg", "exp_avg_sq"))
    for state in optimizer.state.values():
        state["step"] = torch.zeros((), device=rate.device)
    return optimizer


def _on_one_device(groups: Iterable[dict[str, Any]], lr: float) -> tuple[list[dict[str, Any]], Tensor]:
    groups = list(groups)
    devices = {parameter.device for group in groups for parameter in group["params"]}
    if len(devices) != 1:
        raise ConfigError(
            "An optimizer needs at least one parameter, and all of them on one device. "
            f"Got {sorted(map(str, devices))}."
        )
    return groups, torch.full((1,), lr, device=devices.pop())


def _make_state(optimizer: torch.optim.Optimizer, keys: Iterable[str]) -> None:
    """Create the state that the first step would create, so that a checkpoint can be loaded before it."""
    for key in keys:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                optimizer.state[parameter][key] = state


def share_rate(optimizer: torch.optim.Optimizer, rate: Tensor) -> None:
    """Make ``rate`` the learning rate of every group. A loaded state_dict replaces it by copies."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def match_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Give gradients the strides of their parameters.

    Fused kernels compare strides even of dimensions of size one, where autograd may choose any.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is not None and gradient.stride() != parameter.stride():
                parameter.grad = gradient.as_strided(parameter.shape, parameter.stride())


def optimizer_state(optimizer: torch.optim.Optimizer, network: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return the optimizer's tensors by parameter name, which stays valid when the parameters change order."""
    return {
        name: {key: value for key, value in optimizer.state[parameter].items() if isinstance(value, Tensor)}
        for name, parameter in _named_parameters(optimizer, network).items()
        if parameter in optimizer.state
    }


@torch.no_grad()
def load_optimizer_state(
    optimizer: torch.optim.Optimizer, network: nn.Module, state: dict[str, dict[str, Tensor]]
) -> None:
    """Copy what :func:`optimizer_state` returned into the optimizer's tensors, in place."""
    parameters = _named_parameters(optimizer, network)
    for name, values in state.items():
        for key, value in values.items():
            optimizer.state[parameters[name]][key].copy_(value)


def _named_parameters(optimizer: torch.optim.Optimizer, network: nn.Module) -> dict[str, Tensor]:
    """Return the optimizer's parameters by name; those of the method, unknown to the network, by number."""
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own = (f"method.{number}" for number in range(len(parameters)))
    return {names[id(p)] if id(p) in names else next(own): p for p in parameters}


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A value for each step. It is a pure function, so a resumed run needs only the step's number.

    >>> rate = Schedule(base=0.1, kind="step", milestones=(800, 1210), factor=0.1)
    >>> [round(rate(step), 4) for step in (0, 799, 800, 1210)]
    [0.1, 0.1, 0.01, 0.001]
    """

    base: float
    """The value before anything changes it."""
    kind: Literal["constant", "step", "cosine"] = "constant"
    """No change; drops at the milestones; or half a cosine from base to zero."""
    milestones: tuple[int, ...] = ()
    """Steps from which the value is multiplied by ``factor`` once more (``step``)."""
    factor: float = 0.1
    """What a milestone multiplies by (``step``)."""
    total_steps: int = 0
    """The step at which the cosine ends (``cosine``)."""
    warmup_steps: int = 0
    """Steps over which the value first rises linearly; the last of them has the full value."""
    start: int = 0
    """Step of the run at which the schedule begins."""

    def __post_init__(self) -> None:
        if self.kind == "cosine" and self.total_steps <= self.warmup_steps:
            raise ConfigError(
                "A cosine schedule must end after its warm-up. "
                f"Got total_steps = {self.total_steps} and warmup_steps = {self.warmup_steps}."
            )

    def __call__(self, step: int) -> float:
        """Return the value in the step with this zero-based number."""
        step -= self.start
        if step < self.warmup_steps:
            return self.base * (step + 1) / self.warmup_steps
        if self.kind == "step":
            return self.base * self.factor ** sum(step >= milestone for milestone in self.milestones)
        if self.kind == "cosine":
            done = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
            return self.base * (1 + math.cos(math.pi * done)) / 2
        return self.base


def learning_rate(config: RunConfig, steps: int, finetune: bool = False) -> Schedule:
    """Return the learning rate of every step of a run with ``steps`` steps per epoch, or of its fine-tuning."""
    if finetune:
        return Schedule(
            start=config.train.epochs * steps,
            base=config.finetune.lr,
            kind=config.finetune.schedule,
            milestones=tuple(epoch * steps for epoch in config.finetune.milestones),
            total_steps=config.finetune.epochs * steps,
        )
    schedule = config.schedule
    if config.train.epochs == 0:
        return Schedule(base=config.optimizer.lr)
    return Schedule(
        base=config.optimizer.lr,
        kind=schedule.kind,
        milestones=tuple(epoch * steps for epoch in schedule.milestones),
        factor=schedule.factor,
        total_steps=config.train.epochs * steps,
        warmup_steps=round(schedule.warmup_epochs * steps),
    )
