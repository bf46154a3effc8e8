"""A figure of the network that given masks would leave, read off the exact plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from softprune.config.target import Key
from softprune.graph import ChannelGraph
from softprune.plan import PrunePlan, make_plan


class PlanCost(Protocol):
    """A figure of a plan that the plan itself does not know, such as a latency."""

    def __call__(self, plan: PrunePlan) -> float: ...


class Measure:
    """The figure named `key` of what masks would leave of a network.

    Args:
        key: "macs", "params", "channels" (of the sites) or "latency".
        graph: The network's channel graph.
        round_to: As in the pruner.
        latency: Tells the latency of a plan; needed for that key alone.
    """

    def __init__(
        self, key: Key, graph: ChannelGraph, *, round_to: int = 1, latency: PlanCost | None = None
    ) -> None:
        assert (key == "latency") == (latency is not None)
        self.key, self.graph, self.round_to, self._latency = key, graph, round_to, latency

    def __call__(self, network: nn.Module, masks: Mapping[str, Tensor]) -> float:
        """The figure after a cut by `masks`; constants that fold depend on the weights of `network`."""
        if self.key == "channels":
            return float(sum(int(mask.sum()) for mask in masks.values()))
        plan = make_plan(self.graph, network, masks, round_to=self.round_to)
        if self._latency is not None:
            return self._latency(plan)
        return float(plan.macs if self.key == "macs" else plan.params)

    def dense(self, network: nn.Module) -> float:
        """The figure before any cut."""
        return self(
            network, {site.name: torch.ones(site.width, dtype=torch.bool) for site in self.graph.sites}
        )
