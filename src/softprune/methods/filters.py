"""Methods that rank the filters which feed a BatchNorm: the rows of one layer's weight, channel by channel."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from softprune.graph import ChannelGraph, ExampleLike
from softprune.methods.optimizer_hooks import all_decayed
from softprune.methods.ranking import StoredPruner
from softprune.selection import Globs, read_graph


class FilterPruner(StoredPruner):
    """A method of SFP's, FPGM's or L1's kind: its sites are fed by filters, and all parameters decay."""

    every_norm: ClassVar[bool] = True
    """Whether BatchNorms that no activation follows, such as the last of a residual branch, are sites too."""
    feeders: dict[str, str]
    """The layer whose filters feed each site."""

    def _read(self, model: nn.Module, example: ExampleLike, include: Globs, exclude: Globs) -> ChannelGraph:
        graph = read_graph(model, example, include=include, exclude=exclude, every_norm=self.every_norm)
        feeders = {site.name: graph.feeder(site.name) for site in graph.sites}
        self.feeders = {name: feeder for name, feeder in feeders.items() if feeder is not None}
        without = "it does not read the filters of one layer alone, channel by channel"
        return graph.only({name: without for name, feeder in feeders.items() if feeder is None})

    def _filter_weights(self, network: nn.Module, site: str) -> Tensor:
        """Return the weight of the layer that feeds `site`, its filters along the first dimension."""
        weight = network.get_submodule(self.feeders[site]).weight
        assert isinstance(weight, Tensor)
        return weight

    def _filters(self, network: nn.Module) -> dict[str, Tensor]:
        """Return the filters of every site, one row each."""
        return {
            site.name: self._filter_weights(network, site.name).detach().flatten(1) for site in self.sites
        }

    def parameter_groups(self, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        return all_decayed(self.model, weight_decay)
