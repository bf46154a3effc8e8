"""The limit of a target, whether a network can meet it, and cuts that do."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from softprune.budget.latency import TableLike
from softprune.budget.measures import MEASURES, PrunableNetwork, check_timing
from softprune.budget.search import CLOSE, Counts, Cut, CutSearch
from softprune.cut import plain_copy
from softprune.errors import ConfigError
from softprune.log import get_logger
from softprune.target import TargetLike, read_target

logger = get_logger(__name__)


@dataclass(frozen=True)
class BudgetStatus:
    """Where a budget is. `pruner.status` returns it; metrics, results and reports show its fields."""

    target: str
    """What is limited: macs, flops, params, channels or latency."""
    limit: float
    """The figure that is not exceeded."""
    dense: float
    """The figure of the dense network."""
    cost: float
    """The figure of what a cut would leave now."""
    strength: float
    """The weight of the sparsity loss."""
    finalised_step: int | None = None
    """The step from which the cut is final; None before."""

    @property
    def margin(self) -> float:
        """The share of the limit that the cut leaves unused; negative before the target is met."""
        return 1 - self.cost / self.limit


class Limit:
    """A target for one network, with the measure and the search that meet it. See :class:`Measure`."""

    def __init__(
        self, target: TargetLike, prunable: PrunableNetwork, *, batch: int | None = None, table: TableLike | None = None
    ) -> None:
        self.target = read_target(target)
        check_timing(self.target.key, batch, table)
        self.prunable, self.network = prunable, prunable.model
        self.measure = MEASURES[self.target.key](prunable, batch, table)
        self._counts: Counts | None = None
        self.set_limit()
        self._check_possible()

    def set_limit(self) -> None:
        """Compute the dense figure and the limit."""
        self.dense = self.measure.dense(self.network)
        self.limit = self.target.limit(self.dense)

    def _check_possible(self) -> None:
        if self.limit >= self.dense:
            raise ConfigError(
                f"A target must be below the dense network's own figure, {self.target.figure(self.dense)}. "
                f"Got {self.target.figure(self.limit)}; train without a target instead."
            )
        floor = max(cut.cost for cut, _ in self.smallest_cuts(trained_like(self.network)))
        if floor > self.limit:
            raise ConfigError(
                f"A target must be within reach: at least {self.target.figure(floor)} "
                f"({100 * floor / self.dense:.1f}%) remain if every site is cut to its floor. Got "
                f"{self.target.figure(self.limit)}; softprune.inspect says what is frozen and why, and min_channels, "
                f"round_to, include and exclude raise the floor.{self.measure.floor_hint()}"
            )

    def smallest_cuts(self, network: nn.Module) -> Iterator[tuple[Cut, dict[str, Tensor]]]:
        """Yield cuts that keep every site at its floor, with the first, the last and random channels.

        Which channels remain may decide what else can be removed: after a split, say, they take different ways.
        """
        generator = torch.Generator().manual_seed(0)
        for order in (lambda width: -torch.arange(width), torch.arange, lambda n: torch.rand(n, generator=generator)):
            scores = {site.name: order(site.width).double() for site in self.prunable.graph.sites}
            search = self.search(scores, network)
            cut = search.cut_of(search.at_rank(0))
            yield cut, search.masks(cut.counts)

    def search(
        self, scores: Mapping[str, Tensor], network: nn.Module | None = None, limit: float | None = None
    ) -> CutSearch:
        """Return a search among the cuts that keep the channels of the highest scores."""

        def cost(masks: Mapping[str, Tensor]) -> float:
            return self.measure(network or self.network, masks)

        rules = self.prunable
        limit = self.limit if limit is None else limit
        return CutSearch(scores, rules.floors, rules.round_to, cost, limit, rules.coupled)

    def masks(self, network: nn.Module, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return masks of the highest scores that meet the limit, with the widths of the last call if they still do."""
        search = self.search(scores, network)
        counts = self._counts
        if counts is None or not (1 - CLOSE) * self.limit <= search.cost(counts) <= self.limit:
            counts = self._counts = search.fit().counts
        return search.masks(counts)

    def status(self, masks: Mapping[str, Tensor], strength: float) -> BudgetStatus:
        """Return where the budget is, given the masks and the strength in force."""
        return BudgetStatus(
            target=self.target.key,
            limit=self.limit,
            dense=self.dense,
            cost=self.measure(self.network, masks),
            strength=strength,
        )


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
