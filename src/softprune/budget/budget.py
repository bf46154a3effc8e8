"""A budget during training: chooses the channels to remove from data and fades them out along a fixed ramp."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from softprune.budget.latency import LatencyTable, TableLike
from softprune.budget.limit import CLOSE, BudgetStatus, BySite, Limit, PrunableNetwork
from softprune.budget.split import LEVELS, FirstOrder, split_scores
from softprune.devices import broadcast_from_rank0_
from softprune.errors import ConfigError, is_integer, is_number
from softprune.log import get_logger
from softprune.masks import SoftMasks
from softprune.module_state import evaluating
from softprune.target import TargetLike

logger = get_logger(__name__)

FINAL_AT = {True: 0.3, False: 0.6}
"""Share of the training steps after which the cut is final, by whether the network is trained at the start. In an
untrained network the features must form first."""
BEGIN = 1 / 6
"""Share of the steps before the final cut in which no channel is masked and importance is collected."""
ROUNDS = 4
"""Number of rounds in which channels are chosen. Scores of a single round would misjudge a large cut, since they
ignore how layers interact."""
SPAN = 6.0
"""While a channel fades, the log-odds that its mask drops it rise from -SPAN to SPAN."""
SAMPLES = 128
"""Number of training samples on which scores are measured, taken from the most recent steps."""
EFFORT = 6
"""Maximum number of forward passes for scores, per training step (about twice the time of a step). Short trainings
measure fewer samples."""
NEAR_ENOUGH = 0.002
"""The search stops when the cost is below the limit by at most this share of it."""
_STAYS = 2**62


class Budget(Limit):
    """Prunes a network to a target during a training of known length.

    First, the network trains without masks while the first-order importance of its channels is collected. Then, in a
    few rounds, :meth:`update` measures how the outputs change without the least important channels of each site
    (:func:`split_scores`) and chooses the next channels to remove. A chosen channel fades out: the log-odds that its
    mask drops it rise along a fixed ramp until it is off. Other channels are not masked. After the last round the
    choice is fixed. None of this depends on the optimizer or the learning rate.
    :class:`softprune.SoftPruner` documents the arguments.
    """

    def __init__(
        self,
        target: TargetLike,
        total_steps: int | None,
        prunable: PrunableNetwork,
        masks: SoftMasks,
        *,
        final_at: float | None = None,
        table: TableLike | None = None,
    ) -> None:
        if not is_integer(total_steps) or total_steps < 1:
            raise ConfigError(
                "`target` needs `total_steps`, the number of optimizer steps of the whole training. "
                f"Got total_steps = {total_steps!r}; pass epochs * len(loader), divided by the micro-batches per step."
            )
        if final_at is not None and (not is_number(final_at) or not 0 < final_at < 1):
            raise ConfigError(
                "`final_at`, the share of the training after which the cut is final, must be more than 0 and less than "
                f"1. Got {final_at!r}; omit it for the default."
            )
        super().__init__(target, prunable, table)
        self.site_masks = masks
        self.site_masks.record(SAMPLES)
        self.importance = FirstOrder(masks)
        self.off_at = torch.full((masks.layout.channels,), _STAYS, device=masks.device)
        """The step from which each channel is off, (channels,); _STAYS for channels that are kept."""
        self.total_steps = int(total_steps)
        self.final_at = FINAL_AT[is_trained(masks)] if final_at is None else float(final_at)
        self.done = 0
        """Number of finished rounds."""
        self.scores: dict[str, Tensor] | None = None
        """Scores of the last round, by site."""
        self._unchecked = 0
        """Steps from now on in which no round ends."""
        self._schedule()
        quicken_statistics_(prunable.model, self.total_steps - self.final_step)

    def _schedule(self) -> None:
        self.final_step = max(1, round(self.final_at * self.total_steps))
        """The step from which the cut is final."""
        begin = max(1, round(BEGIN * self.final_step))
        ends = [begin + round(number * (self.final_step - begin) / ROUNDS) for number in range(ROUNDS + 1)]
        self.rounds = dict(pairwise(ends))
        """Maps the step at which a round chooses channels to the step from which these are off."""
        self.fade = max(1, (self.final_step - begin) // ROUNDS)

    # --- the training ------------------------------------------------------------------------------------------

    @property
    def is_decided(self) -> bool:
        """Whether all channels to remove have been chosen."""
        return self.done == len(self.rounds)

    @property
    def is_final(self) -> bool:
        """Whether all channels to remove are off. Synchronises with the device."""
        return self.is_decided and bool((self.off_at[self.off_at != _STAYS] <= self.site_masks.clock.step).all())

    def before_step(self) -> None:
        """Collect importance, with in-place tensor operations only."""
        self.importance.add_()

    def after_step(self) -> None:
        """Advance the fading of the chosen channels by a step, with in-place tensor operations only."""
        self._set_odds(self.site_masks.clock.step + 1)

    @torch.no_grad()
    def _set_odds(self, step: Tensor) -> None:
        if self.off_at.device != step.device:
            self.off_at = self.off_at.to(step.device)
        left = (self.off_at - step) / self.fade  # 1 when a channel begins to fade, 0 when it is off
        odds = (SPAN * (1 - 2 * left)).masked_fill(left <= 0, torch.inf).masked_fill(self.off_at == _STAYS, -torch.inf)
        assert self.site_masks.drop is not None
        self.site_masks.drop.copy_(odds)

    def is_due(self, step: int) -> bool:
        """Return whether a round that is not finished ends with this step."""
        return step in self.rounds and [*self.rounds].index(step) >= self.done

    def step_to_check(self) -> int | None:
        """Count a step, and return the number of steps done if a round may end now; None otherwise.

        Reading the clock waits for the device, so it is read only then.
        """
        self._unchecked -= 1
        if self._unchecked > 0:
            return None
        step, last = int(self.site_masks.clock.step), self.total_steps
        if step > last:
            logger.warning(
                "softprune: training goes on after total_steps=%d: the cut was final after step %d and stays. Pass the "
                "optimizer steps of the whole training, such as epochs * len(loader)",
                last,
                self.final_step,
            )
            self._unchecked = sys.maxsize
        else:
            self._unchecked = min((due for due in self.rounds if due > step), default=last + 1) - step
        return step

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Run the round due after `step` steps: choose the next channels. All processes must call this together."""
        share = (self.done + 1) / len(self.rounds)
        keep, cost = self._choose(self.network, self.dense * (self.limit / self.dense) ** share if share < 1 else None)
        self._remove(keep, self.rounds[step])
        self.done += 1
        logger.info(
            "budget, round %d of %d: %s of %s remain from step %d on, limit %s",
            self.done,
            len(self.rounds),
            self.target.figure(cost),
            self.target.figure(self.dense),
            self.rounds[step],
            self.target.figure(self.limit),
        )
        if self.is_decided:
            self.site_masks.record(0)

    def _choose(self, network: nn.Module, limit: float | None = None) -> tuple[BySite, float]:
        """Measure scores, and return masks within `limit` (the target's by default) and the cost of their cut."""
        masks, example = self.site_masks, self.prunable.example
        assert masks.drop is not None
        masks.drop.copy_(torch.where(self.off_at == _STAYS, -torch.inf, torch.inf))
        # Before the first training step there is only the example, whose batch statistics are meaningless.
        with nullcontext() if masks.inputs else evaluating(self.prunable.model):
            inputs = [*masks.inputs] or [(example.args, example.kwargs)]
            calls = EFFORT * self.total_steps // (ROUNDS * LEVELS * len(self.prunable.graph.sites))
            inputs = inputs[-max(calls, 1) :]
            importance = self.importance.scores()
            self.scores = split_scores(self.prunable, masks, importance, inputs, lambda keep: self.cost(keep, network))
        self.importance.row.zero_()
        return self._fit(network, limit)

    def _fit(self, network: nn.Module, limit: float | None = None) -> tuple[BySite, float]:
        """Return masks within the limit by the scores of the last round, the same on all ranks, and their cost."""
        assert self.scores is not None
        search = self.search(self.scores, network, limit)
        counts = search.fit(close=NEAR_ENOUGH)
        masks, cost = search.masks(counts), search.cost(counts)
        if cost > search.limit:
            off = {name: score == -torch.inf for name, score in self.scores.items()}
            others = (
                (kept, other)
                for other, kept in self.smallest_cuts(network)
                if other <= search.limit and not any(bool((kept[name] & off[name]).any()) for name in kept)
            )
            masks, cost = next(others, (masks, cost))
        if cost > search.limit and limit is None:
            raise ConfigError(
                f"`target` cannot be met: the smallest exact cut has {self.target.figure(cost)}, the limit is "
                f"{self.target.figure(search.limit)}. Relax the target, or allow more channels to be removed: "
                "softprune.inspect shows which are frozen and why."
            )
        if limit is None and cost < (1 - CLOSE) * search.limit:
            logger.warning(
                "softprune: the cut leaves %s, more than %g%% below the limit of %s: %s",
                self.target.figure(cost),
                100 * CLOSE,
                self.target.figure(search.limit),
                f"channels are kept in multiples of {self.prunable.round_to}"
                if self.prunable.round_to > 1
                else "one more channel would exceed it",
            )
        row = self.site_masks.row(masks)
        broadcast_from_rank0_(row.view(torch.uint8))
        return self.site_masks.by_site(row), cost

    def _remove(self, keep: BySite, off_at: Tensor | int) -> None:
        """Turn all channels not in `keep` off at step `off_at`; channels chosen earlier keep their own step."""
        stays = self.site_masks.row(keep)
        self.off_at.copy_(torch.where(stays | (self.off_at != _STAYS), self.off_at, off_at))
        self._set_odds(self.site_masks.clock.step)

    # --- the cut -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def finalise(self, network: nn.Module | None = None) -> None:
        """Turn all chosen channels off now, and remove more if the cut exceeds the limit.

        The cost may have changed since the choice: the weights decide which constants can be folded into biases.
        """
        network = network or self.network
        now = self.site_masks.clock.step
        if not self.is_decided:
            self._remove(self._choose(network)[0], now)
            self.done = len(self.rounds)
            self.site_masks.record(0)
        self.off_at.copy_(torch.where(self.off_at == _STAYS, _STAYS, torch.minimum(self.off_at, now)))
        self._set_odds(now)
        keep = {name: mask.cpu() for name, mask in self.site_masks.by_site(self.site_masks.hard()).items()}
        if self.cost(keep, network) > self.limit and self.scores is not None:
            self.scores = {name: score.masked_fill(~keep[name], -torch.inf) for name, score in self.scores.items()}
            self._remove(self._fit(network)[0], now)

    @contextmanager
    def tentative(self, *, of_a_copy: bool = False) -> Iterator[None]:
        """Undo on exit what is decided in the block, unless the cut is final. With `of_a_copy`, undo it always."""
        if self.is_final and not of_a_copy:
            yield
            return
        state, inputs = self.state_dict(), self.site_masks.inputs
        try:
            yield
        finally:
            self.load_state_dict(state)
            self.site_masks.inputs = inputs

    def status(self, masks: BySite) -> BudgetStatus:
        return replace(super().status(masks), finalised_step=self.final_step if self.is_final else None)

    # --- state -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state."""
        return {
            "total_steps": self.total_steps,
            "final_at": self.final_at,
            "done": self.done,
            "off_at": self.off_at.to("cpu", copy=True),
            "drop": None if self.site_masks.drop is None else self.site_masks.drop.to("cpu", copy=True),
            "importance": self.importance.row.to("cpu", copy=True),
            "inputs": self.site_masks.inputs_to_save(),
            "scores": self.scores,
            # Measuring again after a resume would give a slightly different limit.
            "table": None if self.table is None else asdict(self.table),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`, in place."""
        if state["table"] is not None:
            self.table = LatencyTable.read(state["table"])
            self._set_limit()
        self.final_at, self.done, self.scores = state["final_at"], state["done"], state["scores"]
        self._schedule()
        assert self.site_masks.drop is not None
        for tensor, value in (
            (self.off_at, state["off_at"]),
            (self.site_masks.drop, state["drop"]),
            (self.importance.row, state["importance"]),
        ):
            tensor.copy_(value)
        self.site_masks.record(0 if self.is_decided else SAMPLES)
        self.site_masks.restore_inputs(state["inputs"])
        self._unchecked = 0


def is_trained(masks: SoftMasks) -> bool:
    """Return whether the channels of any BatchNorm differ in scale or shift, unlike in a new network."""
    parameters = (each.detach() for bn in masks.modules for each in (bn.weight, bn.bias))
    return any(bool(each.max() - each.min() > 1e-6) for each in parameters)


def quicken_statistics_(model: nn.Module, steps: int) -> None:
    """Raise the momentum of BatchNorms whose statistics would not adapt to the cut within `steps`, in place.

    EfficientNets have a momentum of 0.01: after 100 steps, a third of the old statistics remains.
    """
    enough = min(0.1, 1 - 0.01 ** (1 / max(steps, 1)))
    slow = [
        module for module in model.modules() if isinstance(module, _BatchNorm) and 0 < (module.momentum or 0) < enough
    ]
    for module in slow:
        logger.debug("momentum %g -> %g", module.momentum, enough)
        module.momentum = enough
    if slow:
        logger.info(
            "raised the BatchNorm momentum to %.2g in %d layers: with less, the statistics would not adapt to the cut "
            "within the %d steps after it",
            enough,
            len(slow),
            steps,
        )
