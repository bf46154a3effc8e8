"""The control: random channels. A method's criterion must do better than this."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor, nn

from softprune.graph import ChannelGraph, ExampleLike
from softprune.masks import channel_words
from softprune.methods.options import PrunerOptions
from softprune.methods.ranking import OneShotPruner, Ratio, drop_lowest, ratio_per_site
from softprune.selection import Globs


class RandomPruner(OneShotPruner):
    """Random channels: the network trains as it is, then :meth:`decide` drops random channels of every site.

    Args:
        model: Any network with BatchNorms that an activation follows; masked in place.
        example: What the model is called with: a tensor, a tuple of arguments, or (args, kwargs).
        ratio: The share of channels that goes at every site, or shares by glob on their names.
        options: Those of every method; see :class:`softprune.methods.options.PrunerOptions`.
    """

    name = "random"

    def __init__(
        self,
        model: nn.Module,
        example: ExampleLike,
        *,
        ratio: Ratio = 0.5,
        **options: Unpack[PrunerOptions],
    ) -> None:
        self._ratio = ratio
        super().__init__(model, example, **options)

    def _read(self, model: nn.Module, example: ExampleLike, include: Globs, exclude: Globs) -> ChannelGraph:
        graph = super()._read(model, example, include, exclude)
        self.ratios = ratio_per_site(self._ratio, [site.name for site in graph.sites])
        return graph

    def _choose(self, network: nn.Module) -> dict[str, Tensor]:
        masks = {}
        for number, site in enumerate(self.sites):
            draws = channel_words(self.clock.seed, number, site.width, self.clock.step.device)
            keep = drop_lowest(draws, int(site.width * self.ratios[site.name]))
            masks[site.name] = self._filled(site, keep, draws)
        return masks
