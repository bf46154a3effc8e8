"""The control: random channels. A method's criterion must do better than this."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor, nn

from softprune.graph import ChannelGraph, ExampleLike, Site
from softprune.masks import channel_words
from softprune.methods.options import RankingOptions
from softprune.methods.ranking import (
    OneShotPruner,
    Ratio,
    drop_lowest,
    ratio_or_target,
    ratio_per_site,
    within_site,
)
from softprune.selection import Globs


class RandomPruner(OneShotPruner):
    """Random channels: the network trains as it is, then :meth:`decide` drops random channels of every site.

    Args:
        model: Any network with BatchNorms that an activation follows; masked in place.
        example: What the model is called with: a tensor, a tuple of arguments, or (args, kwargs).
        ratio: The share of channels to remove at every site, or shares by glob on their names; 0.5 by default.
        options: `target` and those of every method; see :class:`softprune.methods.options.RankingOptions`.
    """

    name = "random"

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
        graph = super()._read(model, example, include, exclude)
        self.ratios = ratio_per_site(self._ratio, [site.name for site in graph.sites])
        return graph

    def _choose(self, network: nn.Module) -> dict[str, Tensor]:
        masks = {}
        for number, site in enumerate(self.sites):
            draws = self._draws(number, site)
            keep = drop_lowest(draws, int(site.width * self.ratios[site.name]))
            masks[site.name] = self._filled(site, keep, draws)
        return masks

    def _draws(self, number: int, site: Site) -> Tensor:
        return channel_words(self.clock.seed, number, site.width, self.clock.step.device)

    def _ranking(self, network: nn.Module) -> dict[str, Tensor]:
        return {site.name: within_site(self._draws(number, site)) for number, site in enumerate(self.sites)}
