"""The control: random channels. A method's criterion must do better than this."""

from __future__ import annotations

from torch import Tensor, nn

from softprune.masks import channel_words
from softprune.methods.ranking import LayerwisePruner


class RandomPruner(LayerwisePruner):
    """Random channels: the network trains as it is, then :meth:`decide` drops random channels of every site.

    The arguments are those of :class:`softprune.methods.ranking.LayerwisePruner`.
    """

    name = "random"

    def _scores(self, network: nn.Module) -> dict[str, Tensor]:
        device = self.clock.step.device
        return {
            site.name: channel_words(self.clock.seed, number, site.width, device)
            for number, site in enumerate(self.sites)
        }
