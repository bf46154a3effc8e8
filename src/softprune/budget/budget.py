"""A budget: adjusts the strength during training, protects channels, and finalises a cut that meets the target."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from softprune.budget.channels import BySite, ChannelState, present
from softprune.budget.controller import Controller
from softprune.budget.latency import TableLike
from softprune.budget.limit import BudgetStatus, Limit
from softprune.budget.measures import PrunableNetwork
from softprune.budget.search import CLOSE, Cut, CutSearch
from softprune.budget.weighting import CostWeights
from softprune.devices import broadcast_from_rank0_
from softprune.errors import CheckpointError, ConfigError, is_integer, is_number
from softprune.log import get_logger
from softprune.masks import MaskedBatchNorm, SoftMasks
from softprune.target import FINAL_AT, TargetLike

logger = get_logger(__name__)

EARLIEST = 0.2
"""The share of the training from which on the cut is finalised as soon as the target is met, for the default
`FINAL_AT`."""
TRIM = 0.1
"""The share of the training, at its end, in which channels are only removed ..."""
ADAPT_STEPS = 50
"""... but this many steps at least, so that running statistics adapt to the masks, and half of all at most."""
REGROW = 0.75
"""The share of the training after which no channel is regrown: it could not learn any more."""
HOLD = 0.25
"""The strength after finalising, as a share of the strength before."""
KEPT_STRENGTH = 1e-4
"""The largest strength on the channels to keep of a network that was trained before: that of runs at a fixed strength.
Only the channels to remove get more, so that a short training does not lose what the others have learned. In an
untrained network all channels are alike, and which of them to keep must show first."""
_UPDATES = 100
_NEAR_ENOUGH = 0.002
"""How far under the limit a cut ends, as a share of it, where single channels allow it."""


class Budget(Limit):
    """Keeps one figure of a network within a limit at the end of a training of known length.

    Until the cut is finalised, :meth:`update` moves the strength, and channels that the target needs are protected:
    their sparsity loss weakens, and turns around, before they die. The cut is finalised as soon as the method's own
    decision is within the limit (see `EARLIEST`), and at `final_at` in any case: the removed channels are off from
    there on, in training as in evaluation. The kept ones are sampled as before, under a lower strength. In the last
    tenth (`TRIM`) channels are only removed. A kept channel is never dead by the method's own rule, except where a
    floor or a multiple needs one. :class:`softprune.SoftPruner` explains the arguments.
    """

    def __init__(
        self,
        target: TargetLike,
        total_steps: int | None,
        prunable: PrunableNetwork,
        *,
        final_at: float = FINAL_AT,
        batch: int | None = None,
        table: TableLike | None = None,
        cost_weighting: float = 0.0,
    ) -> None:
        if not is_integer(total_steps) or total_steps < 1:
            raise ConfigError(
                "`target` needs `total_steps`, the number of optimizer steps of the whole training. "
                f"Got total_steps = {total_steps!r}; pass epochs * len(loader), divided by the micro-batches of a step."
            )
        if not is_number(final_at) or not 0 < final_at < 1:
            raise ConfigError(
                "`final_at`, the share of the training after which the cut is final, must be more than 0 and less than "
                f"1. Got {final_at!r}; the default is {FINAL_AT:g}."
            )
        super().__init__(target, prunable, batch=batch, table=table)
        total_steps, final_at = int(total_steps), float(final_at)
        self.total_steps, self.final_at = total_steps, final_at
        # The cut is pursued as in a training of this length with the default `FINAL_AT`.
        pursuit = max(1, round(total_steps * final_at / FINAL_AT))
        adapt = min(ADAPT_STEPS, total_steps // 2)
        self.every = max(1, pursuit // _UPDATES)
        self.earliest = EARLIEST * pursuit
        self.trim_at = total_steps - max(round(TRIM * total_steps), adapt)
        self.latest = min(round(final_at * total_steps), total_steps - adapt)
        self.channels = ChannelState(prunable.graph, prunable.model)
        self.was_trained = self.channels.is_trained()
        self.controller = Controller(pursuit)
        self.cost_weights = CostWeights(cost_weighting, self.measure, self.channels.widths)
        self.finalised_step: int | None = None
        self.score: float | None = None
        self.regrown = 0
        self._near: int | None = None
        self._scores: BySite | None = None

    # --- the training ------------------------------------------------------------------------------------------

    @property
    def is_final(self) -> bool:
        """Whether a cut is in force (reads the device)."""
        return self.channels.in_force

    def next_update(self, step: int) -> int | None:
        """Return the next step after `step` at which :meth:`update` is due; None if there is none."""
        if step >= self.total_steps:
            return None
        if self.finalised_step is None:
            return min((step // self.every + 1) * self.every, max(self.latest, step + 1))
        due = (step // (2 * self.every) + 1) * 2 * self.every
        return min(self.trim_at if step < self.trim_at < due else due, self.total_steps)

    @torch.no_grad()
    def update(self, step: int) -> float:
        """Update weights, and the cut, when `step` steps are done; return the strength from here on.

        With several processes all must call this together; the costs of rank 0 count, since running statistics, and
        with them what folds, differ a little. NaN scores, those of a training that diverged, give the strength NaN.
        """
        scores = self.channels.scores()
        if any(bool(score.isnan().any()) for score in scores.values()):
            return math.nan
        if self.finalised_step is None:
            strength = self._pursue(step, scores)
        elif step < self.trim_at:
            strength = self._hold(step, scores)
        else:
            strength = self._trim(step, scores)
        self._scores = scores
        return strength

    def _pursue(self, step: int, scores: BySite) -> float:
        self.channels.in_force = False  # decided before its time, and training continues
        search = self.search(scores)
        near = torch.tensor(search.rank(self._near, within=1 + len(search.row) // 200, close=CLOSE))
        broadcast_from_rank0_(near := near.to(self.channels.masks.device))
        self._near = int(near)
        keep = search.masks(search.at_rank(self._near))
        self.score = max(
            (float(score[~keep[name]].max()) for name, score in scores.items() if not keep[name].all()), default=0.0
        )
        if step >= self.latest or (self.score <= 0 and step >= self.earliest):
            self._finalise(step, scores)
            return self._hold(step, self.channels.scores())
        factors, endangered = self.channels.protection(scores, self._scores, keep, self._kept_share)
        self._set_weights(self.cost_weights.apply(factors, self.network, keep))
        # A lower strength does not help channels that do not get all of it.
        strength = self.controller.update(step, self.score, endangered if self._kept_share == 1 else 0.0)
        logger.debug("step %d: score %.3f, strength %.3g", step, self.score, strength)
        return strength

    @property
    def _kept_share(self) -> float:
        """The share of the strength that the channels to keep get at most."""
        return min(1.0, KEPT_STRENGTH / self.controller.strength) if self.was_trained else 1.0

    def _finalise(self, step: int, scores: BySite) -> None:
        """Put the cut into force, with regrown channels where more have died than the target asks for."""
        regrows = step <= REGROW * self.total_steps
        masks = self._put_in_force(scores, self.network, step, alive_only=not regrows)
        self.finalised_step = step
        if regrows:
            self._regrow(step, masks, scores)

    def _put_in_force(self, scores: BySite, network: nn.Module, step: int | None, *, alive_only: bool) -> BySite:
        """Put the best cut within the limit into force, and return its masks."""
        search = self.search(scores, network, alive_only=alive_only)
        cut, masks = self._within_limit(search, search.fit(close=_NEAR_ENOUGH), network)
        self._report(cut, step, scores, masks)
        self.channels.allowed = masks
        self.channels.in_force = True
        return masks

    def _regrow(self, step: int, allowed: BySite, scores: BySite) -> None:
        dead = {name: allowed[name] & (score <= 0) for name, score in scores.items()}
        count = self.channels.regrow(dead, step)
        if count:
            self.regrown += count
            logger.info("regrew %d channels after step %d", count, step)

    def _hold(self, step: int, scores: BySite) -> float:
        """Keep the kept channels alive: those about to die are pushed back, and the others are left alone then."""
        allowed = self.channels.allowed
        died = any(bool((allowed[name] & (score <= 0)).any()) for name, score in scores.items())
        factors, endangered = self.channels.protection(scores, self._scores, allowed, self._kept_share)
        if step <= REGROW * self.total_steps:
            self._regrow(step, allowed, scores)
        only_back = died or endangered > 0.01 or step >= self.trim_at
        # What is pushed back is so with the strength that it was pushed down with.
        factors = {
            name: torch.where(factor < 0, factor / HOLD, 0.0 if only_back else factor) * allowed[name]
            for name, factor in factors.items()
        }
        self._set_weights(self.cost_weights.apply(factors, self.network, allowed))
        return HOLD * self.controller.strength if any(bool(f.any()) for f in factors.values()) else 0.0

    def _trim(self, step: int, scores: BySite) -> float:
        """Remove channels if the cut no longer fits, and at the end the dead ones."""
        is_last = step >= self.total_steps
        self._fit(self.network, step, alive_only=is_last)
        return 0.0 if is_last else self._hold(step, scores)

    @torch.no_grad()
    def finalise(self, network: nn.Module | None = None) -> None:
        """Put a cut that fits into force now, or make sure that the one in force still fits.

        The cost of a cut can change while the weights learn: what folds into a bias depends on them.
        """
        network = network or self.network
        if self.is_final:
            self._fit(network)
        else:
            self._put_in_force(self.channels.scores(network), network, None, alive_only=True)

    def _fit(self, network: nn.Module, step: int | None = None, *, alive_only: bool = True) -> None:
        """Remove channels from the cut in force that died, if `alive_only`, and more if it does not fit."""
        allowed, scores = self.channels.allowed, self.channels.scores(network)
        if not alive_only:
            scores = {name: score + 1e3 for name, score in scores.items()}
        only = {name: torch.where(allowed[name], score, score - 1e6) for name, score in scores.items()}
        search = self.search(only, network, alive_only=True)
        cut = search.cut_of(search.at_rank(len(search.row)))
        if cut.cost > self.limit:
            cut = search.refine(cut)
        cut, masks = self._within_limit(search, cut, network)
        if any(not torch.equal(masks[name], allowed[name]) for name in masks):
            self.channels.allowed = masks
            if step is not None:
                self._report(cut, step, scores, masks)

    def _within_limit(self, search: CutSearch, cut: Cut, network: nn.Module) -> tuple[Cut, BySite]:
        """Return `cut` with its masks. Where the best channels do not fit, return other channels that do."""
        masks = search.masks(cut.counts)
        if cut.cost > self.limit:
            others = ((each, kept) for each, kept in self.smallest_cuts(network) if each.cost <= self.limit)
            cut, masks = next(others, (cut, masks))
        # With several processes, those of rank 0.
        device = self.channels.masks.device
        masks = {name: mask.to(device) for name, mask in masks.items()}
        broadcast_from_rank0_(*(mask.view(torch.uint8) for mask in masks.values()))
        return cut, {name: mask.cpu() for name, mask in masks.items()}

    def _set_weights(self, weights: BySite) -> None:
        self.channels.weights = weights
        broadcast_from_rank0_(present(self.channels.masks.weight))

    @contextmanager
    def tentative(self, *, of_a_copy: bool = False) -> Iterator[None]:
        """Undo at the end what is decided inside, if it is before its time or for a copy of the network."""
        if self.finalised_step is not None and not of_a_copy:
            yield
            return
        allowed, in_force = self.channels.allowed, self.is_final
        try:
            yield
        finally:
            self.channels.allowed = allowed
            self.channels.in_force = in_force

    def _report(self, cut: Cut, step: int | None, scores: BySite, masks: BySite) -> None:
        alive = 0
        if self.finalised_step is None:
            alive = sum(int(((score > 0) & ~masks[name]).sum()) for name, score in scores.items())
        self.log_cut(cut, step, alive, sum(int((~mask).sum()) for mask in masks.values()))

    @torch.no_grad()
    def copy_to(self, network: nn.Module) -> None:
        """Let a copy of the network, an EMA for example, evaluate with the cut that is in force here."""
        masks: Any = next((each.masks for each in network.modules() if isinstance(each, MaskedBatchNorm)), None)
        if isinstance(masks, SoftMasks) and masks.allowed is not None and masks.in_force is not None:
            masks.allowed.copy_(present(self.channels.masks.allowed))
            masks.in_force.copy_(present(self.channels.masks.in_force))

    def status(self, masks: Mapping[str, Tensor], strength: float) -> BudgetStatus:
        return replace(
            super().status(masks, strength), score=self.score, finalised_step=self.finalised_step, regrown=self.regrown
        )

    # --- state -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to resume exactly."""
        return {
            "key": self.target.key,
            "limit": self.limit,
            "total_steps": self.total_steps,
            "final_at": self.final_at,
            "was_trained": self.was_trained,
            "controller": self.controller.state_dict(),
            "cost_weights": self.cost_weights.state_dict(),
            "near": self._near,
            "score": self.score,
            "finalised_step": self.finalised_step,
            "regrown": self.regrown,
            "in_force": self.is_final,
            "allowed": self.channels.allowed,
            "weights": self.channels.weights,
            "scores": self._scores,
            "measure": self.measure.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from :meth:`state_dict`, in place; :meth:`check_state` says whether that is possible."""
        self.measure.load_state_dict(state["measure"])
        self.set_limit()
        self.controller.load_state_dict(state["controller"])
        self.cost_weights.load_state_dict(state["cost_weights"])
        self.was_trained = bool(state["was_trained"])
        self._near, self.regrown = state["near"], state["regrown"]
        self.score = state["score"] if "score" in state else state["margin"]  # its name in older states
        self.finalised_step, self._scores = state["finalised_step"], state["scores"]
        self.channels.allowed, self.channels.weights = state["allowed"], state["weights"]
        self.channels.in_force = state["in_force"]

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise a CheckpointError unless a state is of a budget that was made alike."""
        made = {"key": self.target.key, "total_steps": self.total_steps, "final_at": self.final_at}
        made |= {} if self.measure.is_timed else {"limit": self.limit}  # a timed one comes with the state
        for key, value in made.items():
            if state.get(key) != value:
                raise CheckpointError(
                    f"a budget's state must be of the same target, length of training and final_at. Its {key!r} is "
                    f"{value!r}; got {state.get(key)!r}. Make the pruner as that of the checkpoint was made."
                )
