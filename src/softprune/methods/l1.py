"""L1-norm filter pruning: the filters with the smallest sum of weights go, once, out of a trained network."""

from __future__ import annotations

from torch import Tensor, nn

from softprune.graph import Site
from softprune.methods.filters import FilterPruner
from softprune.methods.ranking import LayerwisePruner


class L1Pruner(LayerwisePruner, FilterPruner):
    """L1-norm filter pruning (Li et al., ICLR 2017) at work on a model.

    The network trains as it is, or comes trained; :meth:`decide` then drops, layer by layer, the filters whose
    weights have the smallest L1 norm. Meant to be fine-tuned. The arguments are those of
    :class:`softprune.methods.ranking.LayerwisePruner`.
    """

    name = "l1"
    every_norm = False

    def _scores(self, network: nn.Module) -> dict[str, Tensor]:
        return {name: filters.abs().sum(1) for name, filters in self._filters(network).items()}

    def _drop_count(self, site: Site) -> int:
        # The authors keep int(width (1 - ratio)).
        return site.width - int(site.width * (1 - self.ratios[site.name]))
