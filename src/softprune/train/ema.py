"""A moving average of the weights (EMA), kept beside the network and swapped in to evaluate or cut."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class WeightAverage:
    """Averages every floating-point parameter and buffer of a network.

    ``decay`` is approached from below, (1 + t) / (10 + t), so that the random start does not linger. The
    count t is on the device, so that a CUDA graph can hold an update.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        tensors = (*model.parameters(), *model.buffers())
        self._live = [tensor.detach() for tensor in tensors if tensor.is_floating_point()]
        self._average = [tensor.clone() for tensor in self._live]
        self._updates = torch.zeros((), dtype=torch.float32, device=self._live[0].device)

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the network as it is now."""
        self._updates.add_(1)
        step = 1 - ((1 + self._updates) / (10 + self._updates)).clamp(max=self.decay)
        change = torch._foreach_sub(self._live, self._average)
        torch._foreach_mul_(change, step)
        torch._foreach_add_(self._average, change)

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

    def state_dict(self) -> dict[str, Any]:
        """The average and how often it was updated."""
        return {"updates": int(self._updates), "average": self._average}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`, in place."""
        self._updates.fill_(state["updates"])
        for mine, theirs in zip(self._average, state["average"], strict=True):
            mine.copy_(theirs)
