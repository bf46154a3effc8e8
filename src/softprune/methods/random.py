"""The control: channels drawn by lot. What a method's criterion is worth shows against it."""

from __future__ import annotations

from torch import Tensor, nn

from softprune.graph import ChannelGraph, ExampleLike
from softprune.masks import channel_words
from softprune.methods.base import RoundTo
from softprune.methods.ranking import Ratio, drop_lowest, ratio_per_site
from softprune.methods.stored import OneShotPruner
from softprune.selection import Globs


class RandomPruner(OneShotPruner):
    """Random channels: the network trains as it is, then :meth:`decide` drops a share of every site's channels by lot.

    Args:
        model: Any network with BatchNorms that an activation follows; masked in place.
        example: What the model is called with: a tensor, a tuple of arguments, or (args, kwargs).
        ratio: The share of channels that goes at every site, or shares by glob on their names.
        include: Only these BatchNorms, by name with wildcards.
        exclude: Not these.
        round_to: Keep a multiple of this many channels at every site.
        min_channels: Keep at least this many at every site.
        seed: Of the lot.
    """

    name = "random"

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
        graph = super()._read(model, example, include, exclude)
        self.ratios = ratio_per_site(self._ratio, [site.name for site in graph.sites])
        return graph

    def _choose(self, network: nn.Module) -> dict[str, Tensor]:
        masks = {}
        for number, site in enumerate(self.sites):
            lots = channel_words(self.clock.seed, number, site.width, self.clock.step.device)
            keep = drop_lowest(lots, int(site.width * self.ratios[site.name]))
            masks[site.name] = self._fitted(site, keep, lots)
        return masks
