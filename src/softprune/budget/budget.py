"""A budget during training: decides from data which channels go, and fades them out along a fixed ramp."""

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
"""The share of the training after which the cut is final, for a trained network and for an untrained one, whose
features must form first."""
BEGIN = 1 / 6
"""The share of that time in which the network is left alone, and the importance of its channels is collected."""
ROUNDS = 4
"""How often the channels that go next are chosen. Layers act together: what is measured at once misjudges a strong
cut."""
SPAN = 6.0
"""While a channel fades, the log-odds that its mask drops it rise from -SPAN to SPAN."""
SAMPLES = 128
"""The training samples on which a choice is measured: those of the last steps."""
EFFORT = 6
"""Forward passes of all measurements together for each step of the training, at most: about twice a step's time. In a
short training fewer samples are measured."""
NEAR_ENOUGH = 0.002
"""How far under the limit a cut may end, as a share of it, where single channels would come closer."""
_STAYS = 2**62


class Budget(Limit):
    """Keeps one figure of a network within a limit at the end of a training of known length.

    In the first part of the training the network is left alone while the first-order importance of its channels is
    collected. Then, in a few rounds, :meth:`update` measures what the outputs lose without the lowest channels of each
    site (:func:`split_scores`), and chooses the channels that go next. A chosen channel fades: the log-odds that its
    mask drops it rise along a fixed ramp until it is off. The other channels are left alone, and after the last round
    nothing changes any more. No part depends on the optimizer or its learning rate.
    :class:`softprune.SoftPruner` explains the arguments.
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
                f"Got total_steps = {total_steps!r}; pass epochs * len(loader), divided by the micro-batches of a step."
            )
        if final_at is not None and (not is_number(final_at) or not 0 < final_at < 1):
            raise ConfigError(
                "`final_at`, the share of the training after which the cut is final, must be more than 0 and less than "
                f"1. Got {final_at!r}; leave it out for the default."
            )
        super().__init__(target, prunable, table)
        self.site_masks = masks
        self.site_masks.record(SAMPLES)
        self.importance = FirstOrder(masks)
        self.off_at = torch.full((masks.layout.channels,), _STAYS, device=masks.device)
        """The step from which each channel is off."""
        self.total_steps = int(total_steps)
        self.final_at = FINAL_AT[is_trained(masks)] if final_at is None else float(final_at)
        self.done = 0
        """Rounds that have passed."""
        self.scores: dict[str, Tensor] | None = None
        """Those of the last round."""
        self._schedule()
        quicken_statistics_(prunable.model, self.total_steps - self.final_step)

    def _schedule(self) -> None:
        self.final_step = max(1, round(self.final_at * self.total_steps))
        """The step from which the cut is final."""
        begin = max(1, round(BEGIN * self.final_step))
        ends = [begin + round(number * (self.final_step - begin) / ROUNDS) for number in range(ROUNDS + 1)]
        self.rounds = dict(pairwise(ends))
        """The steps at which channels are chosen, and those from which the chosen ones are off."""
        self.fade = max(1, (self.final_step - begin) // ROUNDS)

    # --- the training ------------------------------------------------------------------------------------------

    @property
    def is_decided(self) -> bool:
        """Whether all channels that go have been chosen."""
        return self.done == len(self.rounds)

    @property
    def is_final(self) -> bool:
        """Whether all channels that go are off (reads the device)."""
        return self.is_decided and bool((self.off_at[self.off_at != _STAYS] <= self.site_masks.clock.step).all())

    def before_step(self) -> None:
        """Collect importance; in-place tensor operations alone."""
        self.importance.add_()

    def after_step(self) -> None:
        """Let the chosen channels fade by a step; in-place tensor operations alone."""
        self._set_odds(self.site_masks.clock.step + 1)

    @torch.no_grad()
    def _set_odds(self, step: Tensor) -> None:
        if self.off_at.device != step.device:
            self.off_at = self.off_at.to(step.device)
        left = (self.off_at - step) / self.fade  # 1 where a channel begins to fade, 0 where it is off
        odds = (SPAN * (1 - 2 * left)).masked_fill(left <= 0, torch.inf).masked_fill(self.off_at == _STAYS, -torch.inf)
        assert self.site_masks.drop is not None
        self.site_masks.drop.copy_(odds)

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Choose the channels that go next, when `step` steps are done. With several processes all must call this."""
        share = (self.done + 1) / len(self.rounds)
        keep, cost = self._choose(self.network, self.dense * (self.limit / self.dense) ** share if share < 1 else None)
        self._remove(keep, self.rounds[step])
        self.done += 1
        logger.info(
            "budget, round %d of %d: %s of %s will be left from step %d on, limit %s",
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
        """Return masks within `limit`, or the target's, that remove what the outputs miss least, and their cost."""
        masks, example = self.site_masks, self.prunable.example
        assert masks.drop is not None
        masks.drop.copy_(torch.where(self.off_at == _STAYS, -torch.inf, torch.inf))
        # Before any training forward there is only the example, which is no batch to normalise by.
        with nullcontext() if masks.inputs else evaluating(self.prunable.model):
            inputs = [*masks.inputs] or [(example.args, example.kwargs)]
            calls = EFFORT * self.total_steps // (ROUNDS * LEVELS * len(self.prunable.graph.sites))
            inputs = inputs[-max(calls, 1) :]
            importance = self.importance.scores()
            self.scores = split_scores(self.prunable, masks, importance, inputs, lambda keep: self.cost(keep, network))
        self.importance.row.zero_()
        return self._fit(network, limit)

    def _fit(self, network: nn.Module, limit: float | None = None) -> tuple[BySite, float]:
        """Return masks by the scores of the last round that are within the limit, and their cost; those of rank 0."""
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
                f"{self.target.figure(search.limit)}. Relax the target, or let more channels go: softprune.inspect "
                "says which are frozen and why."
            )
        if limit is None and cost < (1 - CLOSE) * search.limit:
            logger.warning(
                "softprune: the cut leaves %s, more than %g%% under the limit of %s: %s",
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
        """Let all channels but those of `keep` be off from a step on; those that fade already go as decided."""
        stays = self.site_masks.row(keep)
        self.off_at.copy_(torch.where(stays | (self.off_at != _STAYS), self.off_at, off_at))
        self._set_odds(self.site_masks.clock.step)

    # --- the cut -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def finalise(self, network: nn.Module | None = None) -> None:
        """Switch off now what goes, and make sure that the cut fits.

        What folds into a bias, and with it the cost of a cut, depends on weights, which have learned since.
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
        """Undo at the end what is decided inside, unless the cut is final; for a copy of the network always."""
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
        """Return everything needed to resume exactly."""
        return {
            "total_steps": self.total_steps,
            "final_at": self.final_at,
            "done": self.done,
            "off_at": self.off_at.to("cpu", copy=True),
            "drop": None if self.site_masks.drop is None else self.site_masks.drop.to("cpu", copy=True),
            "importance": self.importance.row.to("cpu", copy=True),
            "inputs": self.site_masks.inputs_to_save(),
            "scores": self.scores,
            # As plain values: another measurement would differ a little, and with it the limit.
            "table": None if self.table is None else asdict(self.table),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from :meth:`state_dict`, in place."""
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


def is_trained(masks: SoftMasks) -> bool:
    """Return whether channels of one BatchNorm differ, which they do not when a network is made."""
    parameters = (each.detach() for bn in masks.modules for each in (bn.weight, bn.bias))
    return any(bool(each.max() - each.min() > 1e-6) for each in parameters)


def quicken_statistics_(model: nn.Module, steps: int) -> None:
    """Raise the momentum of BatchNorms whose statistics would not forget the dense network within `steps`, in place.

    EfficientNets come with a momentum of 0.01: after 100 steps a third of their statistics are still the old ones.
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
            "BatchNorm momentum is raised to %.2g in %d layers: with less, their statistics would not follow the cut "
            "within the %d steps after it",
            enough,
            len(slow),
            steps,
        )
