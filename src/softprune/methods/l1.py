"""L1-norm filter pruning: the filters with the smallest sum of weights go, once, out of a trained network."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from softprune.graph import ChannelGraph, ExampleLike
from softprune.methods.base import RoundTo
from softprune.methods.decay import all_decay
from softprune.methods.filters import fed_by_filters, filters_of
from softprune.methods.ranking import Ratio, drop_lowest, ratio_per_site
from softprune.methods.stored import OneShotPruner
from softprune.selection import Globs


class L1Pruner(OneShotPruner):
    """L1-norm filter pruning (Li et al., ICLR 2017) at work on a model.

    The network trains as it is, or comes trained; :meth:`decide` then drops, layer by layer, the filters whose
    weights have the smallest L1 norm. Meant to be fine-tuned.

    Args:
        model: Any network in which layers feed BatchNorms that an activation follows; masked in place.
        example: What the model is called with: a tensor, a tuple of arguments, or (args, kwargs).
        ratio: The share of filters that goes from every layer, or shares by glob on the BatchNorms' names.
        include: Only these BatchNorms, by name with wildcards.
        exclude: Not these.
        round_to: Keep a multiple of this many channels at every site.
        min_channels: Keep at least this many at every site.
        seed: Not used; every method has one.
    """

    name = "l1"

    def __init__(
        self,
        model: nn.Module,
        example: ExampleLike,
        *,
        ratio: Ratio = 0.5,
        include: Globs = None,
        exclude: Globs = None,
        round_to: RoundTo = 1,
        min_channels: int = 0,
        seed: int = 0,
    ) -> None:
        self._ratio = ratio
        super().__init__(
            model,
            example,
            include=include,
            exclude=exclude,
            round_to=round_to,
            min_channels=min_channels,
            seed=seed,
        )

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
            masks[site.name] = self._fitted(site, keep, norms)
        return masks

    def parameter_groups(self, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        return all_decay(self.model, weight_decay)
