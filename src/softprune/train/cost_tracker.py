"""What the network costs as training goes on: exactly, and by the authors' counting where it has a rule."""

from typing import Any

from torch import Tensor, nn

from softprune.costs import Cost, PaperCounter, cost
from softprune.data import DataBundle
from softprune.errors import ConfigError
from softprune.methods import Pruner
from softprune.train.site_history import SiteHistory


class CostTracker:
    """Counts the dense network once, and what its masks keep whenever asked.

    Args:
        dense: The network before any cut, on the CPU; only its structure matters.
        data: Tells the shape of an image.
    """

    def __init__(self, dense: nn.Module, data: DataBundle) -> None:
        self.dense_network = dense
        self._image = data.example(1)
        self.dense_cost = cost(dense, self._image)
        self._paper_counter = _paper_counter(dense, self._image)
        self.dense = self.totals(self.dense_cost, self._paper({}))
        self._last: tuple[dict[str, Tensor], dict[str, Any]] | None = None

    def of_network(self, network: nn.Module, masks: dict[str, Tensor]) -> tuple[Cost, dict[str, Any]]:
        """Cost of a compact network as it stands; ``masks`` are the dense network's, for the paper's counting."""
        device = next(network.parameters()).device
        counted = cost(network, self._image.to(device))
        return counted, self.totals(counted, self._paper(masks))

    def kept(self, pruner: Pruner | None, book: SiteHistory) -> dict[str, Any]:
        """What a cut at this moment would leave: channels, params, macs and the paper's counting.

        All of it while a method has not decided: that is the network whose accuracy is measured.
        """
        if pruner is None or not pruner.decided:
            return self.dense
        masks = book.dense_masks(pruner.masks())
        # Towards the end of training masks hardly change, and planning a deep network takes its time.
        if self._last is not None and all(masks[name].equal(mask) for name, mask in self._last[0].items()):
            return self._last[1]
        plan = pruner.plan()
        masked = sum(len(mask) for mask in masks.values())
        channels = self.dense_cost.channels - masked + sum(int(mask.sum()) for mask in masks.values())
        kept = {
            "channels": channels,
            "params": plan.params,
            "macs": plan.macs,
            "paper": self._paper(masks),
        }
        self._last = (masks, kept)
        return kept

    def _paper(self, masks: dict[str, Tensor]) -> dict[str, int] | None:
        if self._paper_counter is None:
            return None
        counted = self._paper_counter.count(masks)
        return {"flops": counted.flops, "params": counted.params, "channels": counted.channels}

    @staticmethod
    def totals(counted: Cost, paper: dict[str, int] | None) -> dict[str, Any]:
        """The entry of result.json for a network."""
        return {"channels": counted.channels, "params": counted.params, "macs": counted.macs, "paper": paper}


def _paper_counter(dense: nn.Module, image: Tensor) -> PaperCounter | None:
    try:
        counter = PaperCounter(dense, image)
        counter.count()
    except ConfigError:
        return None  # not one of the paper's networks
    return counter
