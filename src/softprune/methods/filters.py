"""Methods that judge the filters of convolutions, each of which feeds a BatchNorm."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from softprune.graph import ChannelGraph, ExampleLike
from softprune.selection import Globs, read_graph


def fed_by_filters(
    model: nn.Module, example: ExampleLike, include: Globs, exclude: Globs, *, every_norm: bool
) -> tuple[ChannelGraph, dict[str, str]]:
    """The graph whose sites are fed by filters, channel by channel, and the layer that feeds each site.

    `every_norm`: also sites that no activation follows, such as the last BatchNorm of a residual branch.
    """
    graph = read_graph(model, example, include=include, exclude=exclude, every_norm=every_norm)
    feeders = {site.name: graph.feeder(site.name) for site in graph.sites}
    without = "it does not read the filters of one layer alone, channel by channel"
    graph = graph.only({name: without for name, feeder in feeders.items() if feeder is None})
    return graph, {name: feeder for name, feeder in feeders.items() if feeder is not None}


def filters_of(network: nn.Module, feeders: Mapping[str, str], site: str) -> Tensor:
    """The weights that feed `site`, one row per filter."""
    weight = network.get_submodule(feeders[site]).weight
    assert isinstance(weight, Tensor)
    return weight.detach().flatten(1)
