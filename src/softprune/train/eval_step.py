"""Evaluation over a whole test set: exact totals, one answer from the device at the end."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softprune.data import ArrayDataset, FolderDataset, FolderLoader
from softprune.data.folder import MEAN, STD
from softprune.module_state import evaluating
from softprune.train.cuda_graph import capture_graph

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvalTotals:
    """How a network does on a test set."""

    images: int
    loss: float
    """Mean cross-entropy."""
    top1: float
    """Percent of the images whose class has the largest output."""
    top5: float
    """Percent whose class is among the five largest."""


class EvalStep:
    """Evaluates a network on a test set: `EvalStep(model, bundle.test, batch_size=500)()`.

    On CUDA a batch is recorded as a graph and replayed; recorded anew when the network's tensors or gates are
    other ones than before. With several processes each takes its share of the images.

    Args:
        model: The network, not wrapped. It is put into evaluation mode meanwhile.
        data: The test images.
        batch_size: Images per forward in each process.
        bf16: Convolutions and matrix products in bfloat16.
        channels_last: Images in channels-last memory order.
        graph: Whether CUDA may use graphs.
        workers: Loader processes, for images from folders.
        rank: This process.
        world_size: Number of processes.
    """

    def __init__(
        self,
        model: nn.Module,
        data: ArrayDataset | FolderDataset,
        *,
        batch_size: int = 500,
        bf16: bool = False,
        channels_last: bool = False,
        graph: bool = True,
        workers: int = 0,
        device: torch.device | str | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.model, self.data = model, data
        self.device = next(model.parameters()).device if device is None else torch.device(device)
        self.bf16, self.channels_last, self.world_size = bf16, channels_last, world_size
        self._wants_graph = graph and self.device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None
        self._recorded: Any = None

        own = torch.arange(rank, len(data), world_size)
        count = min(batch_size, len(own)) or 1
        missing = -len(own) % count
        # The last batch is filled up with the first image, which then does not count.
        self._rows = F.pad(own, (0, missing)).view(-1, count)
        self._counts = (
            F.pad(torch.ones(len(own)), (0, missing)).view(-1, count).to(self.device, torch.float64)
        )
        self._loader = None
        if isinstance(data, FolderDataset):
            self._loader = FolderLoader(data, workers=workers, device=self.device)
        self._mean, self._std = (torch.tensor(v, device=self.device).view(3, 1, 1) for v in (MEAN, STD))
        self._totals = torch.zeros(4, dtype=torch.float64, device=self.device)
        self._images: Tensor | None = None
        self._labels = torch.zeros(count, dtype=torch.int64, device=self.device)
        self._weights = torch.zeros(count, dtype=torch.float64, device=self.device)

    @torch.no_grad()
    def __call__(self) -> EvalTotals:
        """Evaluate the network as it is now."""
        if self.world_size > 1:
            # Each process normalises by its own running statistics; the first one's are what is saved.
            for buffer in self.model.buffers():
                torch.distributed.broadcast(buffer, src=0)
        with evaluating(self.model):
            self._totals.zero_()
            state = _tensors_and_gates(self.model) if self._wants_graph else None
            if state != self._recorded:
                self._graph, self._recorded = None, state
            for (images, labels), weights in zip(self._batches(), self._counts, strict=True):
                self._place(images, labels, weights)
                if self._wants_graph and self._graph is None:
                    self._record()
                if self._graph is None:
                    self._batch()
                else:
                    self._graph.replay()
        if self.world_size > 1:
            torch.distributed.all_reduce(self._totals)
        images_seen, loss, first, five = self._totals.tolist()
        return EvalTotals(
            int(images_seen), loss / images_seen, 100 * first / images_seen, 100 * five / images_seen
        )

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self._loader is None:
            assert isinstance(self.data, ArrayDataset)
            for row in self._rows.to(self.device):
                yield self.data.batch(row)
        else:
            for pixels, labels in self._loader.batches(self._rows, torch.zeros_like(self._rows)):
                yield (pixels.to(torch.float32) - self._mean) / self._std, labels

    def _place(self, images: Tensor, labels: Tensor, weights: Tensor) -> None:
        """Into buffers that stay in place, for the graph."""
        if self._images is None:
            order = torch.channels_last if self.channels_last else torch.contiguous_format
            self._images = images.contiguous(memory_format=order)
        self._images.copy_(images)
        self._labels.copy_(labels)
        self._weights.copy_(weights)

    def _record(self) -> None:
        totals = self._totals.clone()

        def restore() -> None:
            self._totals.copy_(totals)

        try:
            self._graph = capture_graph(self._batch, self.device, trial=self._batch, undo=restore)
        except Exception as error:
            log.warning("evaluation cannot run as a CUDA graph: %s: %s", type(error).__name__, error)
            self._wants_graph = False
            restore()

    def _batch(self) -> None:
        assert self._images is not None
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16, cache_enabled=False):
            logits = self.model(self._images)
        losses = F.cross_entropy(logits.float(), self._labels, reduction="none").double()
        best = logits.topk(min(5, logits.shape[1]), dim=1).indices == self._labels[:, None]
        first, five = best[:, 0], best.any(1)
        ones = torch.ones_like(self._weights)
        columns = torch.stack([ones, losses, first.double(), five.double()], dim=1)
        self._totals.add_((self._weights[:, None] * columns).sum(0))


def _tensors_and_gates(model: nn.Module) -> list[Any]:
    """What a recorded evaluation depends on and cannot notice: where tensors are, and what gates hold."""
    state: list[Any] = [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]
    for module in model.modules():
        gate = getattr(module, "gate", None)
        if gate is not None:
            state.append(id(gate))
            for name, value in vars(gate).items():
                state.append((name, value.data_ptr() if isinstance(value, Tensor) else id(value)))
    return state
