"""A moving average of the weights (EMA), kept beside the network and swapped in to evaluate or cut."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    """Averages every floating-point parameter and buffer of a network.

    ``decay`` is approached from below, (1 + t) / (10 + t), so that the random start does not linger.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self._live = [
            tensor.detach()
            for tensor in (*model.parameters(), *model.buffers())
            if tensor.is_floating_point()
        ]
        self._average = [tensor.clone() for tensor in self._live]

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the network as it is now."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(self._average, self._live, 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block the network holds the average; its own weights come back afterwards."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        # In place, so that a captured graph and an optimizer go on seeing the same tensors.
        for live, average in zip(self._live, self._average, strict=True):
            held = live.clone()
            live.copy_(average)
            average.copy_(held)

    def state_dict(self) -> dict[str, int | list[Tensor]]:
        """The average and how often it was updated."""
        return {"updates": self.updates, "average": self._average}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, int | list[Tensor]]) -> None:
        """Continue from :meth:`state_dict`."""
        updates, average = state["updates"], state["average"]
        assert isinstance(updates, int)
        assert isinstance(average, list)
        self.updates = updates
        for mine, theirs in zip(self._average, average, strict=True):
            mine.copy_(theirs)
