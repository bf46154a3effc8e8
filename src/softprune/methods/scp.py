"""Soft Channel Pruning (SCP): masks from each BatchNorm's own shift and scale, learned with the weights."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, Unpack

from torch import Tensor, nn
from torch.optim import Optimizer

from softprune.budget import Budget, TargetLike, measure_latency
from softprune.errors import CheckpointError, ConfigError
from softprune.graph import ExampleLike, Site
from softprune.masks import Gate, MaskConfig, SoftGate
from softprune.methods.base import Pruner
from softprune.methods.options import PrunerOptions
from softprune.methods.validation import check_cut, check_values

logger = logging.getLogger(__name__)


class SoftPruner(Pruner):
    """SCP at work on a model.

    Args:
        model: Any network with BatchNorms that an activation follows; masked in place.
        example: What the model is called with: a tensor, a tuple of arguments, or (args, kwargs).
        strength: The paper's lambda, the weight of the sparsity loss (1e-4 for VGG on CIFAR-10, the default).
        target: Instead of a strength, a budget: ``{"macs": 0.5}`` keeps at most half of the MACs; also params,
            channels and latency, and as an amount "50%" or the figure itself. The strength then finds itself.
        total_steps: Optimizer steps of the whole training, which a target needs to arrive in time.
        latency_batch: Samples per call at which a latency target is measured; the example's by default.
        masks: The constants of the masks; the defaults are the authors'.
        options: Those of every method; see :class:`softprune.methods.options.PrunerOptions`.
    """

    name = "scp"
    penalised = True
    shifts_decide = True

    def __init__(
        self,
        model: nn.Module,
        example: ExampleLike,
        *,
        strength: float | None = None,
        target: TargetLike | None = None,
        total_steps: int | None = None,
        latency_batch: int | None = None,
        masks: MaskConfig | None = None,
        **options: Unpack[PrunerOptions],
    ) -> None:
        if target is not None and strength is not None:
            raise ConfigError(
                "`strength` and `target` exclude each other: a target moves the strength by itself. "
                f"Got strength = {strength!r} and target = {target!r}; give one of them."
            )
        if target is None and total_steps is not None:
            raise ConfigError(f"`total_steps` goes with a `target`. Got {total_steps!r} without one.")
        if latency_batch is not None and not _is_timed(target):
            raise ConfigError(
                f"`latency_batch` goes with a latency target. Got {latency_batch!r} and target = {target!r}; leave it "
                "out, or pass target={'latency': ...}."
            )
        if latency_batch is not None and (not isinstance(latency_batch, int) or latency_batch < 1):
            raise ConfigError(f"`latency_batch` is a whole number from 1 on. Got {latency_batch!r}.")
        if masks is not None and not isinstance(masks, MaskConfig):
            raise ConfigError(
                f"`masks` must be a MaskConfig. Got {masks!r}; pass softprune.MaskConfig(...), or None for the "
                "authors' constants."
            )
        self.mask_config = masks or MaskConfig()
        super().__init__(
            model,
            example,
            strength=1e-4 if strength is None else strength,
            **options,
        )
        self.budget: Budget | None = None
        if target is not None:
            try:
                self.budget = self._make_budget(target, total_steps, latency_batch)
            except BaseException:
                self.detach()
                raise
            self.strength = self.budget.controller.strength
        self._calls_until_look = 0

    def _make_budget(self, target: TargetLike, total_steps: int | None, latency_batch: int | None) -> Budget:
        return Budget(
            target,
            total_steps,
            graph=self.graph,
            network=self.model,
            floors={site.name: self.floor(site) for site in self.sites},
            lines=self.coupled,
            round_to=self.round_to,
            latency=measure_latency(self.graph, self.model, self.example, batch=latency_batch)
            if _is_timed(target)
            else None,
        )

    def _gate(self, number: int, site: Site) -> Gate:
        return SoftGate(
            self.mask_config,
            self.clock,
            number,
            activation=site.activation,
            round_to=self.round_to,
            min_channels=self.floor(site),
        )

    def _hard(self, name: str, network: nn.Module) -> Tensor:
        # A copy may be without masks, and does not know then what is tied.
        tied = [(self._soft_gate(other), network.get_submodule(other)) for other in self.coupled_to(name)]
        return self._soft_gate(name).hard(network.get_submodule(name), tied)  # type: ignore[arg-type]

    def _soft_gate(self, name: str) -> SoftGate:
        gate = self._masked[name].gate
        assert isinstance(gate, SoftGate)
        return gate

    def _extra_loss(self) -> Tensor:
        return self.strength * self._hooks.bank.loss()

    # --- a target --------------------------------------------------------------------------------------------------

    def update_strength(self, step: int) -> None:
        if self.budget is not None and step > 0 and self.budget.next_look(step - 1) == step:
            strength = self.budget.look(step)
            if not math.isfinite(strength):
                check_values(self.model)  # training has diverged, which it says
            self.strength = strength

    def _after_optimizer_step(self, optimizer: Optimizer) -> None:
        super()._after_optimizer_step(optimizer)
        if self.budget is None or not self.updates_on_step:
            return
        self._calls_until_look -= 1
        if self._calls_until_look > 0:
            return
        # Reading the clock waits for the device, hence only when a look is due at the earliest.
        step = int(self.clock.step)
        self.update_strength(step)
        following = self.budget.next_look(step)
        self._calls_until_look = self.budget.total_steps if following is None else following - step

    def decide(self) -> dict[str, Tensor]:
        if self.budget is not None:
            self.budget.settle()
        return super().decide()

    def compact(
        self, model: nn.Module | None = None, *, round_to: int | None = None, gathers: bool = True
    ) -> nn.Module:
        check_cut(round_to, gathers)
        if self.budget is not None:
            if not gathers or round_to not in (None, self.round_to):
                raise ConfigError(
                    "a target is met by one cut, the one that it was counted with: with gathers, in multiples of "
                    f"{self.round_to}. Got gathers={gathers!r}, round_to={round_to!r}; give `round_to` to the pruner "
                    "itself, and for a cut without gathers train with a strength instead of a target."
                )
            return self._fitting(self.budget, model)
        return super().compact(model, round_to=round_to, gathers=gathers)

    def _fitting(self, budget: Budget, model: nn.Module | None) -> nn.Module:
        """The cut that fits the budget; before its time a trial, which changes nothing of the training."""
        step = int(self.clock.step)
        if step < budget.settle_at and not budget.settled:
            logger.warning(
                "this cut is a trial at step %d of total_steps=%d; the network trains with the cut that fits from step "
                "%d on at the latest. If training ends here, call pruner.decide() first: until then the masked network "
                "evaluates without it",
                step,
                budget.total_steps,
                budget.settle_at,
            )
        network = self.model if model is None else self._network_of(model)
        with budget.on_trial(step, of_a_copy=network is not self.model):
            budget.settle(network)
            budget.impose(network)
            compact = super().compact(model)
            if budget.latency is not None:
                budget.latency.report(self.plan(model), compact, self.example)
        if network is not self.model:
            budget.impose(network)
        return compact

    def state_dict(self) -> dict[str, Any]:
        budget = {} if self.budget is None else {"budget": self.budget.state_dict()}
        return {**super().state_dict(), "masks": self.mask_config.model_dump(), **budget}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if isinstance(state, dict) and ("budget" in state) != (self.budget is not None):
            raise CheckpointError(
                "a pruner's state must be of a pruner with the same target. "
                f"Got one {'with' if 'budget' in state else 'without'} a target; make the pruner as that of the "
                "checkpoint was made."
            )
        if isinstance(state, dict):  # before anything is changed
            self._check_masks(state.get("masks", {}))  # older states have none
            if self.budget is not None:
                self.budget.check_state(state["budget"])
        super().load_state_dict(state)
        if self.budget is not None:
            self.budget.load_state_dict(state["budget"])
            self._calls_until_look = 0

    def _check_masks(self, saved: dict[str, Any]) -> None:
        """A training must go on with the masks that it began with."""
        if not isinstance(saved, dict):
            raise CheckpointError(
                f"a pruner's state must be what state_dict() returned. Got {saved!r} for its masks."
            )
        here = self.mask_config.model_dump()
        for name, value in saved.items():
            if here.get(name) != value:
                raise CheckpointError(
                    f"a pruner's state must be of the same masks. Their {name!r} is {here.get(name)!r}; got {value!r}. "
                    "Make the pruner with the MaskConfig of the checkpoint's."
                )


def _is_timed(target: TargetLike | None) -> bool:
    return isinstance(target, Mapping) and "latency" in target
