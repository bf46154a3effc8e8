"""Evaluation of a network: accuracy on a test set, and latency of a forward pass."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from softprune.devices import Call, broadcast_from_rank0_, capture_graph, has_fast_bf16
from softprune.lab.config.settings import RunConfig
from softprune.lab.data import ArrayDataset, BatchLoader, DataBundle, LoadedDataset, normalised
from softprune.lab.train.step import layout_of
from softprune.lab.world import World
from softprune.log import get_logger
from softprune.module_state import evaluating

logger = get_logger(__name__)

_BATCH = 500
"""Maximum number of images per forward pass."""
_NUMBERS = 128 * 3 * 224 * 224
"""Maximum number of input values per forward pass: 128 images of ImageNet's usual size."""
LATENCY_SECONDS = 1.5
"""Time after which no further block of a latency measurement is started."""


@dataclass(frozen=True)
class EvalTotals:
    """Accuracy and loss of a network on a test set."""

    images: int
    loss: float
    """Mean cross-entropy."""
    top1: float
    """Top-1 accuracy in percent."""
    top5: float | None
    """Top-5 accuracy in percent; None for a network with at most five classes."""


class Evaluator:
    """Evaluates networks on the images of a run, which are split among the processes."""

    def __init__(self, data: DataBundle, config: RunConfig, world: World) -> None:
        self._data, self._world = data, world
        self._workers = config.data.workers
        self._bf16 = config.train.precision == "bf16" and has_fast_bf16(world.device)
        self._layout = layout_of(world.device)
        self._loaders: dict[int, BatchLoader] = {}

    @torch.no_grad()
    def __call__(self, network: nn.Module, *, on_test: bool = False) -> EvalTotals:
        """Return accuracy and loss of ``network``. All processes must call this together.

        Uses the held-out images if there are any and ``on_test`` is False, otherwise the test images.
        """
        data = self._data.test if on_test or self._data.holdout is None else self._data.holdout
        device = self._world.device
        own = torch.arange(self._world.rank, len(data), self._world.size)
        rows = own.split(min(_BATCH, max(1, _NUMBERS // math.prod(data.shape))))
        totals = torch.zeros(4, dtype=torch.float64, device=device)
        broadcast_from_rank0_(*network.buffers())  # running statistics differ between processes
        with evaluating(network):
            for images, labels in self._batches(data, rows):
                with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self._bf16, cache_enabled=False):
                    logits = network(images.contiguous(memory_format=self._layout))
                losses = F.cross_entropy(logits.float(), labels, reduction="none").double()
                best = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
                columns = [torch.ones_like(losses), losses, best[:, 0].double(), best.any(1).double()]
                totals += torch.stack(columns, dim=1).sum(0)
        images_seen, loss, first, five = self._world.sum_(totals).tolist()
        top5 = 100 * five / images_seen if self._data.num_classes > 5 else None
        return EvalTotals(int(images_seen), loss / images_seen, 100 * first / images_seen, top5)

    def _batches(self, data: ArrayDataset | LoadedDataset, rows: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        if isinstance(data, ArrayDataset):
            for row in rows:
                yield data.batch(row.to(data.device))
            return
        if id(data) not in self._loaders:  # reuse the worker processes
            self._loaders[id(data)] = BatchLoader(data, workers=self._workers, device=self._world.device)
        mean, std = data.mean.to(self._world.device), data.std.to(self._world.device)
        for pixels, labels in self._loaders[id(data)].batches(rows, map(torch.zeros_like, rows)):
            yield normalised(pixels, mean, std), labels


@torch.no_grad()
def latency_ms(network: nn.Module, batch: Tensor) -> float:
    """Return the latency of a forward pass in eval mode, in milliseconds: the fastest block, as other load only adds.

    On CUDA the forward pass is replayed as a CUDA graph. Otherwise the launch overhead of Python would dominate the
    latency of small networks.
    """

    def forward() -> None:
        network(batch)

    call: Call = forward
    with evaluating(network):
        if batch.device.type == "cuda":
            try:
                call = capture_graph(forward, batch.device, trial=forward, undo=lambda: None).replay
            except Exception as error:
                logger.info("measuring the latency of eager calls: a CUDA graph could not be captured: %s", error)
        timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
        return 1000 * min(timer.adaptive_autorange(min_run_time=0.2, max_run_time=LATENCY_SECONDS).times)
