"""What every pruning method has: sites to mask, hooks around a step, a plan, and a verified cut."""

from __future__ import annotations

import logging
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from softprune.costs import fastest_multiple, fitting_multiple
from softprune.errors import CheckpointError, ConfigError, ModelError
from softprune.graph import ChannelGraph, ExampleLike, Site
from softprune.masks import Chain, Clock, Gate, MaskedBatchNorm, draw_chain, mask_
from softprune.masks.gates import check_rounding
from softprune.masks.hooks import hook_root_, unmask_model_
from softprune.methods.decay import spare_shifts
from softprune.methods.optimizer_hooks import Ride, check_optimizer, check_trains, warn_of_decay
from softprune.methods.summary import Summary
from softprune.methods.validation import (
    check_cut,
    check_loss,
    check_state,
    check_strength,
    check_values,
    nothing_to_prune,
)
from softprune.plan import PrunePlan, coupled_sites, make_plan, required_sites
from softprune.selection import Globs, read_graph
from softprune.surgery import Certificate, apply_plan, verify_plan

logger = logging.getLogger(__name__)


RoundTo = int | Literal["auto"]
"""A multiple of channels, or "auto" for the one that is fastest on this machine."""


class Pruner:
    """A pruning method at work on a model. Subclasses say what gate each site gets and what happens around a step.

    The model's BatchNorms are masked in place (same parameters, same state_dict keys); your loop, optimizer,
    scheduler and wrappers stay yours.
    """

    name: ClassVar[str]
    capturable: ClassVar[bool] = True
    """Whether all it does around a step is tensor operations in place, which a CUDA graph can hold."""
    penalised: ClassVar[bool] = False
    """Whether it adds :attr:`strength` times something to the loss."""
    shifts_decide: ClassVar[bool] = False
    """Whether the decision reads BatchNorm shifts, which weight decay would then hold back."""
    steers_itself: bool = True
    """Whether :meth:`steer` rides on the optimizer's steps."""
    certificate: Certificate | None
    """How close masked and compact were at the last :meth:`compact`."""

    def __init__(
        self,
        model: nn.Module,
        example: ExampleLike,
        *,
        include: Globs = None,
        exclude: Globs = None,
        round_to: RoundTo = 1,
        min_channels: int = 0,
        strength: float = 0.0,
        seed: int = 0,
    ) -> None:
        check_strength(strength)
        check_rounding(1 if round_to == "auto" else round_to, min_channels)
        check_values(model)
        self.graph = self._read(model, example, include, exclude)
        if not self.graph.sites:
            raise nothing_to_prune(model, self.graph.frozen)
        if self.graph.unreached:
            logger.warning(
                "the example does not lead to %s%s: what only they read may be cut away. Pass an example that does",
                ", ".join(self.graph.unreached[:3]),
                " ..." if len(self.graph.unreached) > 3 else "",
            )
        self.model = model
        self.example = self.graph.example
        device = next(model.parameters()).device
        self.required = required_sites(self.graph)
        self.lines = coupled_sites(self.graph)
        if round_to == "auto":
            widths = [site.width for site in self.graph.sites]
            round_to = fitting_multiple(fastest_multiple(device), widths, len(self.required))
        self.round_to = round_to
        self.min_channels = min_channels
        self.certificate = None
        self.clock = Clock(seed, device)
        self._strength = torch.tensor(float(strength), device=device)
        self._ride: Ride | None = None
        self._begun = self._ended = False
        self._losses = 0
        gates = [self._gate(number, site) for number, site in enumerate(self.graph.sites)]
        self._masked: dict[str, MaskedBatchNorm] = {
            site.name: mask_(model.get_submodule(site.name), gate)  # type: ignore[arg-type]
            for site, gate in zip(self.graph.sites, gates, strict=True)
        }
        for name, bn in self._masked.items():
            bn.tied = tuple(self._masked[other] for other in self.tied_to(name))
        self._hooks = hook_root_(model, self.clock, self._masked.values())

    # --- what a method says --------------------------------------------------------------------------------------

    def _read(self, model: nn.Module, example: ExampleLike, include: Globs, exclude: Globs) -> ChannelGraph:
        """The channel graph with the sites that the method masks."""
        return read_graph(model, example, include=include, exclude=exclude)

    def _gate(self, number: int, site: Site) -> Gate:
        """The gate of one site."""
        raise NotImplementedError

    def _extra_loss(self) -> Tensor | None:
        """What the method adds to the task loss; None for nothing."""
        return None

    def _begin(self) -> None:
        """Runs once, when a pruner that has not trained yet is attached."""

    def _evaluated(self, network: nn.Module) -> nn.Module:
        """`network`, or a copy, whose plain BatchNorms compute what the masked ones do on the channels they keep."""
        return network

    def before_step(self) -> None:
        """Runs before every optimizer step."""

    def after_step(self) -> None:
        """Runs after every optimizer step."""

    def steer(self, step: int) -> None:
        """Work on the host between two steps, when `step` are done in all; a method with a target has some.

        In a loop of yours it rides on the optimizer. A loop whose steps run without the host sets
        `steers_itself` to False and calls this after every step.
        """

    def end_epoch(self, epoch: int) -> None:
        """Call after every epoch; most methods do nothing there."""

    @property
    def decided(self) -> bool:
        """Whether evaluation uses the masks. Methods that decide once, after training, say so by :meth:`decide`."""
        return True

    def decide(self) -> dict[str, Tensor]:
        """Settle the decision, where the method takes it once after training, and return the masks in force."""
        return self.masks()

    # --- the loop ------------------------------------------------------------------------------------------------

    @property
    def sites(self) -> tuple[Site, ...]:
        """The masked BatchNorms."""
        return self.graph.sites

    @property
    def strength(self) -> Tensor:
        """The weight of what the method adds to the loss: a scalar on the device that may change during training."""
        device = self.clock.step.device
        if self._strength.device != device:
            self._strength = self._strength.to(device)
        return self._strength

    @strength.setter
    def strength(self, value: float | Tensor) -> None:
        check_strength(value)
        # In place, so that a captured CUDA graph sees the new value.
        self.strength.copy_(torch.as_tensor(value))

    def floor(self, site: Site) -> int:
        """The fewest channels that `site` keeps."""
        is_required = any(name in self.required for name in (site.name, *self.tied_to(site.name)))
        return min(max(self.min_channels, int(is_required)), site.width)

    def tied_to(self, name: str) -> tuple[str, ...]:
        """The other sites of the line that site `name` is in, if it is in one."""
        line = next((line for line in self.lines if name in line), ())
        return tuple(other for other in line if other != name)

    def draw_ahead(self, chain: Chain = draw_chain) -> None:
        """Draw the masks of the next training forward now rather than as it begins.

        For loops that compile their forward as a whole: one that starts with the masks at hand compiles faster and
        runs faster. `chain` is :func:`softprune.masks.draw_chain`, compiled perhaps. The masks are the same.
        """
        self._hooks.draw_ahead(chain)

    def loss(self, task: Tensor) -> Tensor:
        """The task loss plus what the method adds. Under eval() or no_grad the task loss, unchanged."""
        check_loss(task)
        if not self.model.training or not torch.is_grad_enabled():
            return task
        if not torch.compiler.is_compiling():
            self._check_sites()
            self._check_attached()
        return self._joined(task)

    def _joined(self, task: Tensor) -> Tensor:
        """The task loss together with the method's own."""
        extra = self._extra_loss()
        return task if extra is None else task + extra.to(task.device)

    def _check_attached(self) -> None:
        """Steps are counted on the optimizer: without one the noise stands still, and targets never arrive."""
        if self._ride is None and self.steers_itself:
            self._losses += 1
            if self._losses == 2:
                logger.warning(
                    "no optimizer is attached, so that no step is counted: call pruner.attach(optimizer) before the "
                    "first step"
                )

    def attach(self, optimizer: Optimizer) -> None:
        """Let the method's step count, and what it does around a step, ride on the optimizer's own hooks."""
        check_optimizer(optimizer)
        self._check_sites()
        if self._ride is not None:
            raise ConfigError(
                "a pruner rides on one optimizer. Got a second one; attach the optimizer that steps the BatchNorms, "
                "once, or release() the first one before."
            )
        check_trains(optimizer, self._masked)
        if self.shifts_decide:
            warn_of_decay(optimizer, self._masked)
        shift = next(iter(self._masked.values())).bias
        self._ride = Ride(optimizer, shift, self.before_step, self._after_optimizer_step)
        if not self._begun:
            self._begin()
            self._begun = True

    @property
    def attached(self) -> bool:
        """Whether it rides on an optimizer."""
        return self._ride is not None

    def release(self) -> None:
        """Let the optimizer go: its steps no longer count, and another one may be attached, for a second phase say."""
        if self._ride is not None:
            self._ride.leave()
            self._ride = None

    def parameter_groups(self, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """Groups for an optimizer: weights and BatchNorm scales decay (2e-4 in the paper), shifts and biases do not."""
        return spare_shifts(self.model, weight_decay)

    def _after_optimizer_step(self, optimizer: Optimizer) -> None:
        # A fused optimizer is stepped by GradScaler even when it skips; it then holds the verdict for its kernel.
        skipped = getattr(optimizer, "found_inf", None)
        self.after_step()
        if skipped is None:
            self.clock.end_step()
        else:
            self.clock.end_step_unless(skipped)

    # --- the decision --------------------------------------------------------------------------------------------

    def masks(self, model: nn.Module | None = None) -> dict[str, Tensor]:
        """The hard mask of every site now, True where a channel is kept. `model`: an EMA or other copy."""
        self._check_sites()
        network = self.model if model is None else self._twin(model)
        return {name: self._hard(name, network).clone() for name in self._masked}

    def _hard(self, name: str, network: nn.Module) -> Tensor:
        """The decision of the gate of site `name` on the BatchNorm that `network`, ours or a copy, has there."""
        return self._masked[name].gate.hard(network.get_submodule(name))  # type: ignore[arg-type]

    def plan(
        self, model: nn.Module | None = None, *, round_to: int | None = None, gathers: bool = True
    ) -> PrunePlan:
        """The decision as data: what every module would keep if the network were cut now. Arguments: see compact."""
        network, masks = self._as_cut(model, round_to, gathers)
        return self._plan_of(network, masks, round_to, gathers)

    def _as_cut(
        self, model: nn.Module | None, round_to: int | None, gathers: bool
    ) -> tuple[nn.Module, dict[str, Tensor]]:
        """The network that a cut starts from, and the masks, if it can be cut so."""
        network = self.model if model is None else self._twin(model)
        check_values(network)
        check_cut(round_to, gathers)
        return self._evaluated(network), self.masks(model)

    def _plan_of(
        self, network: nn.Module, masks: dict[str, Tensor], round_to: int | None, gathers: bool
    ) -> PrunePlan:
        multiple = self.round_to if round_to is None else round_to
        return make_plan(self.graph, network, masks, round_to=multiple, gathers=gathers)

    def summary(self) -> Summary:
        """Width and kept channels per site, and the totals before and after. Prints as a table."""
        return Summary.of(
            self.graph,
            self.masks(),
            self.plan(),
            {site.name: self.floor(site) for site in self.sites},
            self._rounded(self.model),
        )

    def _rounded(self, network: nn.Module) -> dict[str, int]:
        """Sites -> channels that are silent and stay, for the sake of a multiple or a floor."""
        found = {}
        for name, bn in self._masked.items():
            here = network.get_submodule(name)
            count = int((self._hard(name, network) & bn.gate.silent(here)).sum())  # type: ignore[arg-type]
            if count:
                found[name] = count
        return found

    @torch.inference_mode(False)
    def compact(
        self, model: nn.Module | None = None, *, round_to: int | None = None, gathers: bool = True
    ) -> nn.Module:
        """A new module of the same class with the silent channels cut out, verified equal to the masked model.

        Nothing of the model is changed; if the result were not exact, a VerificationError is raised and there is no
        result. How much is cut never changes what is computed, only how fast a machine may be at it.

        Args:
            model: A copy of the trained network (an EMA, say) whose weights are to be cut instead.
            round_to: Fill what convolutions give, and what BatchNorms read of a stream, up to this multiple, with
                silent channels as zeros; None: the pruner's own. Pieces of a split and dead branches stay as they are.
            gathers: Whether layers may read a part of a shared stream (a residual sum, a concatenation) through an
                index. Without, they read all of it: fewer, larger operations, which small batches may prefer.
        """
        network, masks = self._as_cut(model, round_to, gathers)
        plan = self._plan_of(network, masks, round_to, gathers)
        self.certificate = verify_plan(plan, network, masks, self.example)
        logger.info("%s", self.certificate)
        compact = apply_plan(plan, network)
        if plan.macs == 0:
            logger.warning(
                "every way to an output is silent: the network is a constant; %s",
                "lower the strength" if self.penalised else "prune less",
            )
        if plan.macs == plan.dense_macs and plan.params >= plan.dense_params:
            why = "no channel was silent"
            if not all(mask.all() for mask in masks.values()):
                why = (
                    "every silent channel stays, for the sake of multiples or of streams that are read whole"
                )
            elif self._rounded(network):
                why = (
                    f"round_to={self.round_to} and min_channels={self.min_channels} keep every silent channel"
                )
            logger.warning("%s: the compact network is as large as the dense one", why)
        return compact

    def detach(self) -> nn.Module:
        """Give the plain model back, with the weights as they are now; the pruner ends."""
        unmask_model_(self.model)
        self._ended = True
        self.release()
        return self.model

    # --- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything to resume exactly, beside the model's and the optimizer's own state."""
        return {
            "method": self.name,
            "sites": [site.name for site in self.sites],
            "clock": self.clock.state_dict(),
            "strength": float(self.strength),
            "begun": self._begun,
            "round_to": self.round_to,
            "min_channels": self.min_channels,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken."""
        check_state(state, {"clock", "strength", "begun"})
        check_state(state["clock"], set())
        check_strength(state["strength"])
        expected = {"method": self.name, "sites": [site.name for site in self.sites]}
        for key in ("round_to", "min_channels"):
            if key in state:  # older states have none
                expected[key] = getattr(self, key)
        for key, value in expected.items():
            if state.get(key) != value:
                raise CheckpointError(
                    "a pruner's state must be of the same method, sites and floors. Its "
                    f"{key!r} is {value!r}; got {state.get(key)!r}. Make the pruner as that of the checkpoint was made."
                )
        self.clock.load_state_dict(state["clock"])
        self.strength = float(state["strength"])
        self._begun = bool(state["begun"])

    # --- inside --------------------------------------------------------------------------------------------------

    def _check_sites(self) -> None:
        """Our masked modules must still be the model's own."""
        if self._ended:
            raise ModelError(
                "a pruner ends with detach(), which gave the plain model back. Got a call after it; make a new pruner."
            )
        for name, bn in self._masked.items():
            here = self._lookup(name)
            if here is not bn or not isinstance(here, MaskedBatchNorm):
                raise ModelError(
                    f"the sites of a pruner must stay in place. '{name}' is now "
                    f"{'gone' if here is None else 'a ' + type(here).__name__}, no longer the BatchNorm that was "
                    "masked; convert modules (convert_sync_batchnorm, fusing, wrapping) before making the pruner, "
                    "or detach() first."
                )

    def _lookup(self, name: str) -> nn.Module | None:
        # In every step, for every site: get_submodule would take a millisecond for a hundred of them.
        here: nn.Module | None = self.model
        for part in name.split(".") if name else ():
            here = None if here is None else here._modules.get(part)
        return here

    def _twin(self, model: nn.Module) -> nn.Module:
        """The network inside DDP, EMA or compile wrappers, which must be a copy of ours."""
        while type(model) is not type(self.model):
            inner = getattr(model, "module", None) or getattr(model, "_orig_mod", None)
            if not isinstance(inner, nn.Module):
                raise ModelError(
                    f"`model` must be a copy of the network that is being pruned, a {type(self.model).__name__}. "
                    f"Got a {type(model).__name__}."
                )
            model = inner
        ours, theirs = (
            {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
            for network in (self.model, model)
        )
        if ours != theirs:
            name = next(name for name in (*ours, *theirs) if ours.get(name) != theirs.get(name))
            raise ModelError(
                "`model` must be a copy of the network that is being pruned, with parameters of the same names and "
                f"shapes. Got {theirs.get(name, 'no such parameter')} for '{name}', which is "
                f"{ours.get(name, 'no parameter')} there."
            )
        return model
