"""One-shot methods that remove a share of every site: filters of small L1 norm, or random channels."""

from collections.abc import Sequence
from typing import ClassVar, Unpack

from torch import Tensor, nn

from softprune.graph import ExampleLike, Site
from softprune.masks import channel_words
from softprune.methods.options import RankingOptions
from softprune.methods.ranking import FilterPruner, OneShotPruner, Ratio, ratio_or_target, ratio_per_site, within_site


class LayerwisePruner(OneShotPruner):
    """A one-shot method that removes the channels of lowest score from every site: a share `ratio` of each."""

    settings: ClassVar[tuple[str, ...]] = ("ratios",)

    def __init__(
        self, model: nn.Module, example: ExampleLike, *, ratio: Ratio | None = None, **options: Unpack[RankingOptions]
    ) -> None:
        self._ratio = ratio_or_target("ratio", ratio, 0.5, options)
        super().__init__(model, example, **options)

    def _check_sites(self, names: Sequence[str]) -> None:
        self.ratios = ratio_per_site(self._ratio, names)

    def _scores(self, network: nn.Module) -> dict[str, Tensor]:
        """Return a score for every channel, by site; they are compared within a site only."""
        raise NotImplementedError

    def _drop_count(self, site: Site) -> int:
        """Return how many channels of `site` are removed."""
        return int(site.width * self.ratios[site.name])

    def _choose(self, network: nn.Module) -> dict[str, Tensor]:
        scores = self._scores(network)
        return {s.name: self._without_lowest(s, scores[s.name], self._drop_count(s)) for s in self.sites}

    def _ranking(self, network: nn.Module) -> dict[str, Tensor]:
        return {name: within_site(scores) for name, scores in self._scores(network).items()}


class L1Pruner(LayerwisePruner, FilterPruner):
    """L1-norm filter pruning (Li et al., ICLR 2017) of a model.

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
    description = "removes the filters of smallest L1 norm from a trained network, once; to be fine-tuned"
    every_norm = False

    def _scores(self, network: nn.Module) -> dict[str, Tensor]:
        return {name: filters.abs().sum(1) for name, filters in self._filters(network).items()}

    def _drop_count(self, site: Site) -> int:
        # The authors keep int(width (1 - ratio)).
        return site.width - int(site.width * (1 - self.ratios[site.name]))


class RandomPruner(LayerwisePruner):
    """Random channels: the network trains as it is, then :meth:`decide` drops random channels of every site.

    The control: a method's criterion must do better.

    Args:
        model: Any network with BatchNorms that an activation follows; masked in place.
        example: What the model is called with: a tensor, a tuple of arguments, or (args, kwargs).
        ratio: The share of channels to remove at every site, or shares by glob on their names; 0.5 by default.
        options: `target` and those of every method; see :class:`softprune.methods.options.RankingOptions`.
    """

    name = "random"
    description = "random channels: the control for a method's criterion"

    def _scores(self, network: nn.Module) -> dict[str, Tensor]:
        device = self.clock.step.device
        return {
            site.name: channel_words(self.clock.seed, number, site.width, device)
            for number, site in enumerate(self.sites)
        }
