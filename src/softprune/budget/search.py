"""The cut that fits: as many of the best channels as the limit allows.

All channels are ranked by one score, so the family of cuts contains the method's own decision. Within a site the kept
channels are always the best ones, hence a cut is a number of channels for each site.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Counts = tuple[int, ...]
CostOf = Callable[[Mapping[str, Tensor]], float]
"""The cost of given masks."""

CLOSE = 0.01
"""How far under the limit a cut may end, as a share of it."""
_PATIENCE = 400
"""Cuts that may be tried to get closer than that."""


@dataclass(frozen=True)
class Cut:
    """How many channels every site keeps, and what that costs."""

    counts: Counts
    cost: float


def units_of(names: Iterable[str], coupled: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    """Return the sites that are cut together: coupled groups first, then the others one by one."""
    groups = [tuple(group) for group in coupled]
    inside = {name for group in groups for name in group}
    return [*groups, *((name,) for name in names if name not in inside)]


class CutSearch:
    """Finds cuts at a limit, for the scores of one moment: within a site the channels with the largest scores are kept.

    Coupled sites keep the same channels, those with the largest of their smallest scores. Channels with a score of -inf
    are off, and stay off.
    """

    def __init__(
        self,
        scores: Mapping[str, Tensor],
        floors: Mapping[str, int],
        round_to: int,
        cost: CostOf,
        limit: float,
        coupled: Iterable[Sequence[str]] = (),
    ) -> None:
        self.units = units_of(scores, coupled)
        self.scores = columns = [
            np.min([scores[name].detach().double().cpu().numpy() for name in unit], axis=0) for unit in self.units
        ]
        self.widths = [len(column) for column in columns]
        self.floors = [max(floors[name] for name in unit) for unit in self.units]
        self.round_to, self.limit, self._cost = round_to, limit, cost
        self.most = [int((column > -np.inf).sum()) for column in columns]
        self._inner = [np.argsort(-column, kind="stable") for column in columns]
        row = np.concatenate(columns)
        order = np.argsort(-row, kind="stable")
        self.row = row[order]
        self._unit = np.repeat(np.arange(len(columns)), self.widths)[order]
        self._known: dict[Counts, float] = {}

    # --- cuts --------------------------------------------------------------------------------------------------

    def masks(self, counts: Counts) -> dict[str, Tensor]:
        """Return the cut as masks, True where a channel stays."""
        masks: dict[str, Tensor] = {}
        for unit, count, order in zip(self.units, counts, self._inner, strict=True):
            mask = torch.zeros(len(order), dtype=torch.bool)
            mask[torch.from_numpy(order[:count])] = True
            masks |= {name: mask.clone() for name in unit}
        return masks

    def cost(self, counts: Counts) -> float:
        if counts not in self._known:
            self._known[counts] = self._cost(self.masks(counts))
        return self._known[counts]

    def cut_of(self, counts: Counts) -> Cut:
        return Cut(counts, self.cost(counts))

    def at_rank(self, rank: int) -> Counts:
        """Return the cut that keeps the `rank` best channels, and what floors and multiples add."""
        wanted = np.bincount(self._unit[:rank], minlength=len(self.units)).tolist()
        return tuple(self._allowed(site, count) for site, count in enumerate(wanted))

    def _allowed(self, site: int, count: int) -> int:
        count = -(-max(count, self.floors[site]) // self.round_to) * self.round_to
        return min(count, self.most[site])

    # --- searching ---------------------------------------------------------------------------------------------

    def rank(self, *, close: float = 0.0) -> int:
        """Return how many of the best channels fit into the limit, by bisection; 0 if none does.

        It ends when the cost is under the limit by the share `close` of it at most.
        """
        low, high = 0, len(self.row) + 1
        while high - low > 1:
            middle = (low + high) // 2
            cost = self.cost(self.at_rank(middle))
            if cost <= self.limit:
                low = middle
                if self._is_close(cost, close):
                    return low
            else:
                high = middle
        return low

    def _is_close(self, cost: float, close: float) -> bool:
        return (1 - close) * self.limit <= cost <= self.limit

    def fit(self, *, close: float = 0.0) -> Cut:
        """Return the best cut found that is not over the limit; `close`: as in :meth:`rank`."""
        rank, own = self.rank(close=close), self.floors
        cut = self._cut_at(rank, close)
        if cut.cost < (1 - CLOSE) * self.limit and rank < len(self.row):
            # The next channel costs more than itself, such as the first one of a branch: make room for it.
            steps = zip(own, self.at_rank(rank), self.at_rank(rank + 1), strict=True)
            self.floors = [floor if now == more else more for floor, now, more in steps]
            other = self._cut_at(self.rank(close=close), close)
            self.floors = own
            cut = other if cut.cost < other.cost <= self.limit else cut
        return cut

    def _cut_at(self, rank: int, close: float) -> Cut:
        cut = self.cut_of(self.at_rank(rank))
        return cut if self._is_close(cut.cost, close) else self.refine(cut, close=close)

    def refine(self, cut: Cut, *, close: float = 0.0) -> Cut:
        """Bring `cut` below the limit if it is over it, then as near to it as single channels allow, or `close`."""
        cut = self._grown(self._shrunk(cut), close=close)
        enough = len(self._known) + _PATIENCE
        # No single channel fits into the gap: give a few up at one site, and fill the wider gap at another.
        pairs = itertools.product((1, 2, 3), self._by_last(cut.counts), range(len(self.units)))
        for steps, giver, taker in pairs:
            if cut.cost >= (1 - CLOSE) * self.limit or len(self._known) > enough:
                break
            less: Cut | None = cut
            for _ in range(steps):
                less = None if less is None else self._less(less, giver)
            if less is not None and taker != giver:
                others = set(range(len(self.units))) - {taker}
                cut = max(cut, self._grown(less, others), key=lambda trial: trial.cost)
        return self._grown(cut, close=close)  # a third site may use what an exchange has left

    def _shrunk(self, cut: Cut) -> Cut:
        while cut.cost > self.limit:
            trials = (self._less(cut, site) for site in self._by_last(cut.counts))
            smaller = next((less for less in trials if less is not None and less.cost < cut.cost), None)
            if smaller is None:  # channels that only save something together
                return self.cut_of(self.at_rank(self.rank()))
            cut = smaller
        return cut

    def _grown(self, cut: Cut, closed: Iterable[int] = (), *, close: float = 0.0) -> Cut:
        shut = set(closed)
        while not self._is_close(cut.cost, close):
            site = max(
                (s for s in range(len(self.units)) if s not in shut and cut.counts[s] < self.most[s]),
                key=lambda s: self.scores[s][self._inner[s][cut.counts[s]]],
                default=None,
            )
            if site is None:
                break
            trial = self._changed(cut, site, cut.counts[site] + 1)
            # A channel that costs nothing is not read: bringing it back would change nothing.
            if cut.cost < trial.cost <= self.limit:
                cut = trial
            else:
                shut.add(site)
        return cut

    def _less(self, cut: Cut, site: int) -> Cut | None:
        """`cut` with one step fewer channels at `site`; None if its floor forbids it."""
        # The count may be the width, which need not be a multiple.
        count = (cut.counts[site] - 1) // self.round_to * self.round_to
        return self._changed(cut, site, count) if self.floors[site] <= count else None

    def _changed(self, cut: Cut, site: int, count: int) -> Cut:
        return self.cut_of((*cut.counts[:site], self._allowed(site, count), *cut.counts[site + 1 :]))

    def _by_last(self, counts: Counts) -> list[int]:
        """Return the sites that keep something, those with the lowest last kept channel first."""
        some = [site for site, count in enumerate(counts) if count]
        return sorted(some, key=lambda site: self.scores[site][self._inner[site][counts[site] - 1]])
