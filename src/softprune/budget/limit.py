"""Cost and limit of a target, and the search for cuts within the limit."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from softprune.budget.latency import LatencyTable, TableLike, measure_latency, own_runtime
from softprune.cut import PrunePlan, make_plan, plain_copy, written
from softprune.errors import ConfigError
from softprune.graph import ChannelGraph
from softprune.graph.reader import Example
from softprune.target import TargetLike, read_target

CLOSE = 0.02
"""A cut that is below the limit by more than this share of it causes a warning."""

BySite = Mapping[str, Tensor]
"""Masks or scores of the channels, (width,), by name of the site."""
FIGURES: dict[str, Callable[[ChannelGraph, PrunePlan], float]] = {
    "macs": lambda graph, plan: plan.macs,
    "flops": lambda graph, plan: 2 * plan.macs,
    "params": lambda graph, plan: plan.params,
    "activations": written,
}
"""Functions that compute a target's metric from a plan. `channels` and `latency` are computed in `Limit.cost`."""


@dataclass(frozen=True)
class PrunableNetwork:
    """A network and the constraints on its cuts."""

    graph: ChannelGraph
    model: nn.Module
    example: Example
    """An input of the model."""
    floors: Mapping[str, int]
    """Minimum number of channels that each site keeps."""
    coupled: Mapping[tuple[str, ...], int] = field(default_factory=dict)
    """Groups of coupled sites, each with its block size: channels are removed in blocks, for grouped convolutions."""
    round_to: int = 1
    """The number of kept channels of a site is a multiple of this."""
    caps: Mapping[str, int] = field(default_factory=dict)
    """Maximum number of channels that a site keeps; its floor takes precedence."""

    def units(self) -> dict[tuple[str, ...], int]:
        """Return the groups of sites that are cut together, coupled ones first, each with its block size."""
        inside = {name for group in self.coupled for name in group}
        return {**self.coupled, **{(site.name,): 1 for site in self.graph.sites if site.name not in inside}}


@dataclass(frozen=True)
class BudgetStatus:
    """Progress towards a target. Returned by `pruner.status`; metrics, results and reports show its fields."""

    target: str
    """The limited metric: macs, flops, params, activations, channels or latency."""
    limit: float
    """Maximum value of the metric for the compact network."""
    dense: float
    """Value of the metric for the dense network."""
    cost: float
    """Value of the metric if the network were cut now."""
    finalised_step: int | None = None
    """The step at which the cut became final; None before."""

    @property
    def margin(self) -> float:
        """The share of the limit that the cut leaves unused; negative while the target is exceeded."""
        return 1 - self.cost / self.limit


class Limit:
    """A target for a network: computes the cost of cuts and finds cuts within the limit.

    Args:
        target: The metric with the share to keep or an absolute value, such as ``{"macs": 0.5}``.
        prunable: The network and the constraints on its cuts.
        table: For a latency target, a table measured before; None measures it now.
    """

    def __init__(self, target: TargetLike, prunable: PrunableNetwork, table: TableLike | None = None) -> None:
        self.target, self.prunable, self.network = read_target(target), prunable, prunable.model
        self.table = self._table(table)
        self._counts: Counts | None = None
        self._set_limit()
        self._check_possible()

    def _table(self, table: TableLike | None) -> LatencyTable | None:
        if self.target.key != "latency":
            if table is not None:
                raise ConfigError(
                    "`latency_table` is for latency targets. "
                    f"Got a target of {self.target.key}; omit the table, or pass target={{'latency': ...}}."
                )
            return None
        graph, model, example = self.prunable.graph, self.prunable.model, self.prunable.example
        if table is None:
            return measure_latency(graph, model, example, own_runtime(model, example), self.prunable.round_to)
        found = LatencyTable.read(table)
        found.check(graph)
        return found

    def _set_limit(self) -> None:
        whole = {site.name: torch.ones(site.width, dtype=torch.bool) for site in self.prunable.graph.sites}
        self.dense = self.cost(whole)
        self.limit = self.target.limit(self.dense)

    def cost(self, masks: BySite, network: nn.Module | None = None) -> float:
        """Return the value of the metric for the network cut by `masks`.

        `network`: the copy of the model whose weights decide which constants can be folded; the model by default.
        """
        if self.target.key == "channels":
            return float(sum(int(mask.sum()) for mask in masks.values()))
        plan = make_plan(self.prunable.graph, network or self.network, masks, round_to=self.prunable.round_to)
        return self._figure(plan)

    def _figure(self, plan: PrunePlan) -> float:
        return float(FIGURES[self.target.key](self.prunable.graph, plan) if self.table is None else self.table(plan))

    def check_met(self, plan: PrunePlan, masks: BySite) -> None:
        """Raise a ConfigError if a cut by `plan` and `masks` exceeds the limit."""
        cost = self.cost(masks) if self.target.key == "channels" else self._figure(plan)
        if cost > self.limit:
            raise ConfigError(
                f"a cut must not exceed its target, {self.target.figure(self.limit)}. Got {self.target.figure(cost)}; "
                "attach the optimizer first, and pass the `round_to` and `gathers` of the target. If the weights have "
                "changed since the decision, make it again with a smaller target."
            )

    def _check_possible(self) -> None:
        if self.limit >= self.dense:
            raise ConfigError(
                f"A target must be below the value of the dense network, {self.target.figure(self.dense)}. "
                f"Got {self.target.figure(self.limit)}; train without a target instead."
            )
        floor = max(cost for cost, _ in self.smallest_cuts(trained_like(self.network)))
        if floor > self.limit:
            hint = "" if self.table is None else self.table.floor_hint
            raise ConfigError(
                f"A target must be within reach: at least {self.target.figure(floor)} "
                f"({100 * floor / self.dense:.1f}%) remain if every site is cut to its floor. Got "
                f"{self.target.figure(self.limit)}; softprune.inspect shows what is frozen and why, and keep, "
                f"min_channels, round_to, include and exclude raise the floor.{hint}"
            )

    def smallest_cuts(self, network: nn.Module) -> Iterator[tuple[float, dict[str, Tensor]]]:
        """Yield (cost, masks) of cuts that reduce every site to its floor: to its first, its last, or random channels.

        The choice affects what else can be removed: after a split, for example, the channels reach different layers.
        """
        generator = torch.Generator().manual_seed(0)
        for order in (lambda width: -torch.arange(width), torch.arange, lambda n: torch.rand(n, generator=generator)):
            scores = {site.name: order(site.width).double() for site in self.prunable.graph.sites}
            search = self.search(scores, network)
            counts = search.at_rank(0)
            yield search.cost(counts), search.masks(counts)

    def search(self, scores: BySite, network: nn.Module | None = None, limit: float | None = None) -> "CutSearch":
        """Return a search over cuts that keep the channels with the highest scores."""
        limit = self.limit if limit is None else limit
        return CutSearch(scores, self.prunable, lambda masks: self.cost(masks, network), limit)

    def masks(self, network: nn.Module, scores: BySite) -> dict[str, Tensor]:
        """Return masks within the limit by score, with the widths of the last call while these are close to it."""
        search = self.search(scores, network)
        counts = self._counts
        if counts is None or not (1 - CLOSE) * self.limit <= search.cost(counts) <= self.limit:
            counts = self._counts = search.fit()
        return search.masks(counts)

    def status(self, masks: BySite) -> BudgetStatus:
        """Return the progress towards the target with the given masks."""
        return BudgetStatus(self.target.key, self.limit, self.dense, self.cost(masks))


def trained_like(network: nn.Module) -> nn.Module:
    """Return a copy with random BatchNorm shifts, as after training.

    In a new network the shifts are zero, and so are the constants that removed channels leave in later layers. After
    training some of these constants cannot be folded, and fewer channels can be removed.
    """
    made = plain_copy(network)
    with torch.no_grad():
        for module in made.modules():
            if isinstance(module, _BatchNorm) and module.affine:
                generator = torch.Generator().manual_seed(module.num_features)
                module.bias.add_(0.1 + torch.rand(module.bias.shape, generator=generator).to(module.bias))
    return made


# --- search among the cuts by score ----------------------------------------------------------------------------

Counts = tuple[int, ...]
"""Number of channels that each unit keeps."""


def by_block(values: NDArray[Any], block: int) -> NDArray[Any]:
    """Replace the values in each block of channels by their mean; channels that are off (-inf) stay off."""
    blocks = values.reshape(-1, block)
    alive = blocks > -np.inf
    means = np.where(alive, blocks, 0.0).sum(1, keepdims=True) / np.maximum(alive.sum(1, keepdims=True), 1)
    return np.where(alive, means, -np.inf).ravel()


class CutSearch:
    """Finds a cut within a limit that keeps the channels with the highest scores.

    Coupled sites keep the same channels; the score of such a channel is the minimum over the sites. Channels with a
    score of -inf are off and stay off.
    """

    def __init__(
        self, scores: BySite, prunable: PrunableNetwork, cost: Callable[[dict[str, Tensor]], float], limit: float
    ) -> None:
        blocks = prunable.units()
        self.units = [*blocks]
        columns = [
            by_block(np.min([scores[name].detach().double().cpu().numpy() for name in unit], axis=0), block)
            for unit, block in blocks.items()
        ]
        self.floors = [max(prunable.floors[name] for name in unit) for unit in self.units]
        self.multiples = [math.lcm(prunable.round_to, block) for block in blocks.values()]
        self.limit, self._cost = limit, cost
        caps = [min(prunable.caps.get(name, math.inf) for name in unit) for unit in self.units]
        self.most = [int((column > -np.inf).sum()) for column in columns]
        for unit, (cap, multiple) in enumerate(zip(caps, self.multiples, strict=True)):
            self.most[unit] = int(min(self.most[unit], max(cap // multiple * multiple, self.floors[unit])))
        self._inner = [np.argsort(-column, kind="stable") for column in columns]
        self._sorted = [column[order] for column, order in zip(columns, self._inner, strict=True)]
        row, unit_of = np.concatenate(columns), np.repeat(np.arange(len(columns)), [len(each) for each in columns])
        self._unit = unit_of[np.argsort(-row, kind="stable")]
        self._known: dict[Counts, float] = {}

    def masks(self, counts: Counts) -> dict[str, Tensor]:
        """Return a cut as masks, True for channels that are kept."""
        masks: dict[str, Tensor] = {}
        for unit, count, order in zip(self.units, counts, self._inner, strict=True):
            mask = torch.zeros(len(order), dtype=torch.bool)
            mask[torch.from_numpy(order[:count])] = True
            masks |= {name: mask.clone() for name in unit}
        return masks

    def cost(self, counts: Counts) -> float:
        """Return the cost of a cut."""
        if counts not in self._known:
            self._known[counts] = self._cost(self.masks(counts))
        return self._known[counts]

    def at_rank(self, rank: int) -> Counts:
        """Return the cut that keeps the `rank` best channels, plus those that floors and multiples require."""
        wanted = np.bincount(self._unit[:rank], minlength=len(self.units)).tolist()
        return tuple(self._allowed(unit, count) for unit, count in enumerate(wanted))

    def _allowed(self, unit: int, count: int) -> int:
        multiple = self.multiples[unit]
        count = math.ceil(max(count, self.floors[unit]) / multiple) * multiple
        return min(count, self.most[unit])

    def fit(self, close: float = 0.0) -> Counts:
        """Return the best cut found within the limit; if there is none, the smallest one.

        The search stops when the cost is below the limit by at most the share `close` of it.
        """
        rank, floors = self._rank(close), self.floors
        found = self._grown(self.at_rank(rank), close)
        if self.cost(found) < (1 - CLOSE) * self.limit and rank < len(self._unit):
            # The next channel costs more than its own share, such as the first one of a branch: make room for it.
            steps = zip(floors, self.at_rank(rank), self.at_rank(rank + 1), strict=True)
            self.floors = [floor if now == more else more for floor, now, more in steps]
            other = self._grown(self.at_rank(self._rank(close)), close)
            self.floors = floors
            found = other if self.cost(found) < self.cost(other) <= self.limit else found
        return found

    def _rank(self, close: float) -> int:
        """Return how many of the best channels fit within the limit, by bisection; 0 if none does."""
        low, high = 0, len(self._unit) + 1
        while high - low > 1:
            middle = (low + high) // 2
            cost = self.cost(self.at_rank(middle))
            if cost > self.limit:
                high = middle
            else:
                low = middle
                if cost >= (1 - close) * self.limit:
                    break
        return low

    def _grown(self, counts: Counts, close: float) -> Counts:
        """Add channels to a cut, the best first, as long as it stays within the limit."""
        closed: set[int] = set()
        while self.cost(counts) < (1 - close) * self.limit and len(closed) < len(counts):
            unit = max(
                (each for each in range(len(counts)) if each not in closed and counts[each] < self.most[each]),
                key=lambda each: self._sorted[each][counts[each]],
                default=None,
            )
            if unit is None:
                break
            more = (*counts[:unit], self._allowed(unit, counts[unit] + 1), *counts[unit + 1 :])
            # A channel that adds no cost is not read by any layer, so keeping it would change nothing.
            if self.cost(counts) < self.cost(more) <= self.limit:
                counts = more
            else:
                closed.add(unit)
        return counts
