"""L1-norm filter pruning: the filters with the smallest sum of weights go, once, out of a trained network."""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor, nn

from softprune.graph import ChannelGraph, ExampleLike
from softprune.methods.optimizer_hooks import all_decayed
from softprune.methods.options import RankingOptions
from softprune.methods.ranking import (
    OneShotPruner,
    Ratio,
    drop_lowest,
    fed_by_filters,
    filters_of,
    ratio_or_target,
    ratio_per_site,
    within_site,
)
from softprune.selection import Globs


class L1Pruner(OneShotPruner):
    """L1-norm filter pruning (Li et al., ICLR 2017) at work on a model.

    The network trains as it is, or comes trained; :meth:`decide` then drops, layer by layer, the filters whose
    weights have the smallest L1 norm. Meant to be fine-tuned.

    Args:
        model: Any network in which layers feed BatchNorms that an activation follows; masked in place.
        example: What the model is called with: a tensor, a tuple of arguments, or (args, kwargs).
        ratio: The share of filters to remove from every layer, or shares by glob on the BatchNorms' names;
            0.5 by default.
        options: `target` and those of every method; see :class:`softprune.methods.options.RankingOptions`.
    """

    name = "l1"

    def __init__(
        self,
        model: nn.Module,
        example: ExampleLike,
        *,
        ratio: Ratio | None = None,
        **options: Unpack[RankingOptions],
    ) -> None:
        self._ratio = ratio_or_target(options, 0.5, ratio=ratio)
        super().__init__(model, example, **options)

    def _read(self, model: nn.Module, example: ExampleLike, include: Globs, exclude: Globs) -> ChannelGraph:
        graph, self.feeders = fed_by_filters(model, example, include, exclude, every_norm=False)
        self.ratios = ratio_per_site(self._ratio, [site.name for site in graph.sites])
        return graph

    def _choose(self, network: nn.Module) -> dict[str, Tensor]:
        masks = {}
        for site in self.sites:
            norms = filters_of(network, self.feeders, site.name).abs().sum(1)
            # The authors keep int(width (1 - ratio)).
            keep = drop_lowest(norms, site.width - int(site.width * (1 - self.ratios[site.name])))
            masks[site.name] = self._filled(site, keep, norms)
        return masks

    def _ranking(self, network: nn.Module) -> dict[str, Tensor]:
        return {
            site.name: within_site(filters_of(network, self.feeders, site.name).abs().sum(1))
            for site in self.sites
        }

    def parameter_groups(self, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        return all_decayed(self.model, weight_decay)
