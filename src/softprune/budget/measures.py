"""The measures of a budget: what a network would cost after a cut. One entry each in :data:`MEASURES`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from softprune.budget.latency import LatencyTable, TableLike, measure_latency, own_runtime
from softprune.cut import PrunePlan, make_plan
from softprune.errors import ConfigError, is_integer
from softprune.graph import ChannelGraph
from softprune.graph.reader import Example


@dataclass(frozen=True)
class PrunableNetwork:
    """A network with the rules that every cut of it follows."""

    graph: ChannelGraph
    model: nn.Module
    example: Example
    """What the model is called with."""
    floors: Mapping[str, int]
    """The fewest channels that each site keeps."""
    coupled: Sequence[Sequence[str]] = ()
    """Groups of sites of which only the channels that all of them keep remain."""
    round_to: int = 1
    """Keep a multiple of this many channels."""


class Measure:
    """A figure of the network that given masks would leave, read from the exact plan.

    For measures that time the network: `batch`, samples per call, or `table`, what was measured before.
    """

    is_timed: ClassVar[bool] = False
    """Whether it runs the network, with a batch size that matters."""

    def __init__(self, prunable: PrunableNetwork, batch: int | None = None, table: TableLike | None = None) -> None:
        self.graph, self.round_to = prunable.graph, prunable.round_to

    def of_plan(self, plan: PrunePlan) -> float:
        """Return the figure of the network that `plan` leaves."""
        raise NotImplementedError

    def __call__(self, network: nn.Module, masks: Mapping[str, Tensor]) -> float:
        """Return the figure after a cut by `masks`; constants that fold depend on the weights of `network`."""
        return self.of_plan(make_plan(self.graph, network, masks, round_to=self.round_to))

    def dense(self, network: nn.Module) -> float:
        """Return the figure before any cut."""
        return self(network, {site.name: torch.ones(site.width, dtype=torch.bool) for site in self.graph.sites})

    def report(self, plan: PrunePlan, compact: nn.Module, example: Example) -> None:
        """Log how the compact network compares with the figure, where it can be measured."""

    def floor_hint(self) -> str:
        """Return what else may be the reason that a target is out of reach."""
        return ""

    def state_dict(self) -> dict[str, Any]:
        """Return what another instance needs to give the same figures."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from :meth:`state_dict`."""


class Macs(Measure):
    """Multiply-accumulate operations per sample."""

    def of_plan(self, plan: PrunePlan) -> float:
        return float(plan.macs)


class Flops(Measure):
    """Floating-point operations per sample: two per multiply-accumulate."""

    def of_plan(self, plan: PrunePlan) -> float:
        return 2.0 * plan.macs


class Params(Measure):
    """Parameters."""

    def of_plan(self, plan: PrunePlan) -> float:
        return float(plan.params)


class Channels(Measure):
    """Channels of the sites, as the summary counts them."""

    def __call__(self, network: nn.Module, masks: Mapping[str, Tensor]) -> float:
        return float(sum(int(mask.sum()) for mask in masks.values()))


class Latency(Measure):
    """Milliseconds per call, by a table: a given one, or one that is measured on this machine."""

    is_timed = True

    def __init__(self, prunable: PrunableNetwork, batch: int | None = None, table: TableLike | None = None) -> None:
        super().__init__(prunable)
        if table is None:
            model, example = prunable.model, prunable.example
            how = own_runtime(model, example, batch)
            self.table = measure_latency(prunable.graph, model, example, how, prunable.round_to)
        else:
            self.table = LatencyTable.read(table)
            self.table.check(prunable.graph)

    def of_plan(self, plan: PrunePlan) -> float:
        return self.table(plan)

    def report(self, plan: PrunePlan, compact: nn.Module, example: Example) -> None:
        self.table.report(plan, compact, example)

    def floor_hint(self) -> str:
        table = self.table
        return (
            f" Of the dense {table.dense_ms:.4g} ms, {table.whole_ms[0]:.4g} ms belong to no layer, and narrow "
            "layers take time, too: measure on an idle machine, or give a larger latency_batch, at which channels "
            "take a larger share."
        )

    def state_dict(self) -> dict[str, Any]:
        # Another measurement would differ a little.
        return asdict(self.table)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.table = LatencyTable.read(state)


MEASURES: dict[str, type[Measure]] = {
    "macs": Macs,
    "flops": Flops,
    "params": Params,
    "channels": Channels,
    "latency": Latency,
}
"""The measure of every quantity that a target can name; the keys are those of `softprune.target`."""


def check_timing(key: str, batch: int | None, table: TableLike | None) -> None:
    """Raise a ConfigError if `batch` or `table` is given to a measure that does not time the network, or is wrong."""
    timed = [name for name, measure in MEASURES.items() if measure.is_timed]
    for name, value in (("latency_batch", batch), ("latency_table", table)):
        if value is not None and key not in timed:
            raise ConfigError(
                f"`{name}` needs a target of {' or '.join(timed)}. Got {value!r} and a target of {key}; leave "
                f"it out, or pass target={{{timed[0]!r}: ...}}."
            )
    if batch is not None and (not is_integer(batch) or batch < 1):
        raise ConfigError(f"`latency_batch` must be an integer of at least 1. Got {batch!r}.")
    if batch is not None and table is not None:
        raise ConfigError(
            "`latency_batch` and `latency_table` exclude each other: a table is of one batch size. "
            f"Got {batch!r} and a table; leave one of them out."
        )
