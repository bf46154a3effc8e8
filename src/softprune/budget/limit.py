"""What a target limits, and the cuts that stay within the limit."""

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
"""How far under the limit a cut may end, as a share of it, without a warning."""

BySite = Mapping[str, Tensor]
"""A mask, or the scores, of the channels of each site."""
FIGURES: dict[str, Callable[[ChannelGraph, PrunePlan], float]] = {
    "macs": lambda graph, plan: plan.macs,
    "flops": lambda graph, plan: 2 * plan.macs,
    "params": lambda graph, plan: plan.params,
    "activations": written,
}
"""What a plan says of a quantity that a target can name. Channels are counted, and latency is a table's."""


@dataclass(frozen=True)
class PrunableNetwork:
    """A network with the rules that every cut of it follows."""

    graph: ChannelGraph
    model: nn.Module
    example: Example
    """What the model is called with."""
    floors: Mapping[str, int]
    """The fewest channels that each site keeps."""
    coupled: Mapping[tuple[str, ...], int] = field(default_factory=dict)
    """Groups of sites that lose the same channels, and how many of them at a time: a group of a convolution."""
    round_to: int = 1
    """Keep a multiple of this many channels."""
    caps: Mapping[str, int] = field(default_factory=dict)
    """The most channels that a site keeps, but for its floor."""

    def units(self) -> dict[tuple[str, ...], int]:
        """Return the sites that are cut together, coupled ones first, and how many of their channels go at a time."""
        inside = {name for group in self.coupled for name in group}
        return {**self.coupled, **{(site.name,): 1 for site in self.graph.sites if site.name not in inside}}


@dataclass(frozen=True)
class BudgetStatus:
    """Where a budget is. `pruner.status` returns it; metrics, results and reports show its fields."""

    target: str
    """What is limited: macs, flops, params, activations, channels or latency."""
    limit: float
    """The figure that is not exceeded."""
    dense: float
    """The figure of the dense network."""
    cost: float
    """The figure of what a cut would leave now."""
    finalised_step: int | None = None
    """The step from which the cut is final; None before."""

    @property
    def margin(self) -> float:
        """The share of the limit that the cut leaves unused; negative before the target is met."""
        return 1 - self.cost / self.limit


class Limit:
    """A target for one network: what a cut costs, and which cuts fit.

    Args:
        target: The quantity with the share to keep, or the figure itself.
        prunable: The network.
        table: For a latency target, what was measured before; None measures here.
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
                    "`latency_table` is for a target of latency. "
                    f"Got a target of {self.target.key}; leave it out, or pass target={{'latency': ...}}."
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
        """Return the figure of the network that a cut by `masks` leaves.

        `network`: a copy whose weights decide which constants can be folded.
        """
        if self.target.key == "channels":
            return float(sum(int(mask.sum()) for mask in masks.values()))
        graph = self.prunable.graph
        plan = make_plan(graph, network or self.network, masks, round_to=self.prunable.round_to)
        return float(FIGURES[self.target.key](graph, plan) if self.table is None else self.table(plan))

    def _check_possible(self) -> None:
        if self.limit >= self.dense:
            raise ConfigError(
                f"A target must be below the dense network's own figure, {self.target.figure(self.dense)}. "
                f"Got {self.target.figure(self.limit)}; train without a target instead."
            )
        floor = max(cost for cost, _ in self.smallest_cuts(trained_like(self.network)))
        if floor > self.limit:
            hint = "" if self.table is None else self.table.floor_hint
            raise ConfigError(
                f"A target must be within reach: at least {self.target.figure(floor)} "
                f"({100 * floor / self.dense:.1f}%) remain if every site is cut to its floor. Got "
                f"{self.target.figure(self.limit)}; softprune.inspect says what is frozen and why, and keep, "
                f"min_channels, round_to, include and exclude raise the floor.{hint}"
            )

    def smallest_cuts(self, network: nn.Module) -> Iterator[tuple[float, dict[str, Tensor]]]:
        """Yield cuts that keep every site at its floor, with the first, the last and random channels.

        Which channels remain may decide what else can be removed: after a split, say, they take different ways.
        """
        generator = torch.Generator().manual_seed(0)
        for order in (lambda width: -torch.arange(width), torch.arange, lambda n: torch.rand(n, generator=generator)):
            scores = {site.name: order(site.width).double() for site in self.prunable.graph.sites}
            search = self.search(scores, network)
            counts = search.at_rank(0)
            yield search.cost(counts), search.masks(counts)

    def search(self, scores: BySite, network: nn.Module | None = None, limit: float | None = None) -> "CutSearch":
        """Return a search among the cuts that keep the channels of the highest scores."""
        limit = self.limit if limit is None else limit
        return CutSearch(scores, self.prunable, lambda masks: self.cost(masks, network), limit)

    def masks(self, network: nn.Module, scores: BySite) -> dict[str, Tensor]:
        """Return masks of the highest scores that meet the limit, with the widths of the last call if they still do."""
        search = self.search(scores, network)
        counts = self._counts
        if counts is None or not (1 - CLOSE) * self.limit <= search.cost(counts) <= self.limit:
            counts = self._counts = search.fit()
        return search.masks(counts)

    def status(self, masks: BySite) -> BudgetStatus:
        """Return where the budget is, given the masks in force."""
        return BudgetStatus(self.target.key, self.limit, self.dense, self.cost(masks))


def trained_like(network: nn.Module) -> nn.Module:
    """Return a copy whose BatchNorm shifts are not zero, as after training.

    A new network's shifts are zero, and so are the constants that removed channels leave in later layers. After
    training some of these constants cannot be folded away, and less can be removed.
    """
    made = plain_copy(network)
    with torch.no_grad():
        for module in made.modules():
            if isinstance(module, _BatchNorm) and module.affine:
                generator = torch.Generator().manual_seed(module.num_features)
                module.bias.add_(0.1 + torch.rand(module.bias.shape, generator=generator).to(module.bias))
    return made


# --- the cuts that one order of the channels allows ------------------------------------------------------------

Counts = tuple[int, ...]
"""How many channels each unit keeps."""


def by_block(values: NDArray[Any], block: int) -> NDArray[Any]:
    """Return the mean of each block of channels in place of their values; channels that are off (-inf) stay off."""
    blocks = values.reshape(-1, block)
    alive = blocks > -np.inf
    means = np.where(alive, blocks, 0.0).sum(1, keepdims=True) / np.maximum(alive.sum(1, keepdims=True), 1)
    return np.where(alive, means, -np.inf).ravel()


class CutSearch:
    """Finds a cut at a limit, for the scores of one moment: within a site the channels with the largest are kept.

    Coupled sites keep the same channels, those with the largest of their smallest scores. Channels with a score of -inf
    are off, and stay off.
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
        """Return a cut as masks, True where a channel stays."""
        masks: dict[str, Tensor] = {}
        for unit, count, order in zip(self.units, counts, self._inner, strict=True):
            mask = torch.zeros(len(order), dtype=torch.bool)
            mask[torch.from_numpy(order[:count])] = True
            masks |= {name: mask.clone() for name in unit}
        return masks

    def cost(self, counts: Counts) -> float:
        """Return what a cut costs."""
        if counts not in self._known:
            self._known[counts] = self._cost(self.masks(counts))
        return self._known[counts]

    def at_rank(self, rank: int) -> Counts:
        """Return the cut that keeps the `rank` best channels, and what floors and multiples add."""
        wanted = np.bincount(self._unit[:rank], minlength=len(self.units)).tolist()
        return tuple(self._allowed(unit, count) for unit, count in enumerate(wanted))

    def _allowed(self, unit: int, count: int) -> int:
        multiple = self.multiples[unit]
        count = math.ceil(max(count, self.floors[unit]) / multiple) * multiple
        return min(count, self.most[unit])

    def fit(self, close: float = 0.0) -> Counts:
        """Return the best cut found that is not over the limit, or the smallest one.

        It ends when the cost is under the limit by the share `close` of it at most.
        """
        rank, floors = self._rank(close), self.floors
        found = self._grown(self.at_rank(rank), close)
        if self.cost(found) < (1 - CLOSE) * self.limit and rank < len(self._unit):
            # The next channel costs more than itself, such as the first one of a branch: make room for it.
            steps = zip(floors, self.at_rank(rank), self.at_rank(rank + 1), strict=True)
            self.floors = [floor if now == more else more for floor, now, more in steps]
            other = self._grown(self.at_rank(self._rank(close)), close)
            self.floors = floors
            found = other if self.cost(found) < self.cost(other) <= self.limit else found
        return found

    def _rank(self, close: float) -> int:
        """Return how many of the best channels fit into the limit, by bisection; 0 if none does."""
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
        """Return a cut with more channels, the best first, as long as it stays within the limit."""
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
            # A channel that costs nothing is not read: bringing it back would change nothing.
            if self.cost(counts) < self.cost(more) <= self.limit:
                counts = more
            else:
                closed.add(unit)
        return counts
