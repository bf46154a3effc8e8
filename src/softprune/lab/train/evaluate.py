"""Evaluation of a network: accuracy on a whole test set, and the latency of a forward."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softprune.distributed import World, broadcast_from_rank0_
from softprune.hardware import capture_graph, has_fast_bf16, time_ms
from softprune.lab.config.settings import RunConfig
from softprune.lab.data import ArrayDataset, BatchLoader, DataBundle, LoadedDataset
from softprune.lab.data.images import normalised
from softprune.log import get_logger
from softprune.module_state import evaluating

logger = get_logger(__name__)


@dataclass(frozen=True)
class EvalTotals:
    """Accuracy and loss of a network on a test set."""

    images: int
    loss: float
    """Mean cross-entropy."""
    top1: float
    """Percentage of the images whose class has the largest output."""
    top5: float | None
    """Percentage of the images whose class is among the five largest outputs; None for five outputs or fewer."""


class EvalStep:
    """Evaluates a network on a test set: `EvalStep(model, bundle.test, batch_size=500)()`.

    On CUDA a batch is captured as a graph and replayed. It is captured again when the network's tensors or gates have
    changed. With several processes each evaluates its share of the images.
    `model` is not wrapped in DDP; `batch_size` is per process; `workers` load images in files.
    """

    def __init__(
        self,
        model: nn.Module,
        data: ArrayDataset | LoadedDataset,
        *,
        batch_size: int = 500,
        bf16: bool = False,
        channels_last: bool = False,
        graph: bool = True,
        workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.model, self.data = model, data
        self.device = next(model.parameters()).device
        self.bf16, self.channels_last, self.world_size = bf16, channels_last, world_size
        self._wants_graph = graph and self.device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None
        self._captured: Any = None

        own = torch.arange(rank, len(data), world_size)
        count = min(batch_size, len(own)) or 1
        missing = -len(own) % count
        # The last batch is padded with the first image, which is not counted there.
        self._rows = F.pad(own, (0, missing)).view(-1, count)
        self._counts = F.pad(torch.ones(len(own)), (0, missing)).view(-1, count).to(self.device, torch.float64)
        self._loader = None
        if isinstance(data, LoadedDataset):
            self._loader = BatchLoader(data, workers=workers, device=self.device)
            self._mean, self._std = data.constants(self.device)
        self._totals = torch.zeros(4, dtype=torch.float64, device=self.device)
        self._images: Tensor | None = None
        self._classes = 0
        self._labels = torch.zeros(count, dtype=torch.int64, device=self.device)
        self._weights = torch.zeros(count, dtype=torch.float64, device=self.device)

    @torch.no_grad()
    def __call__(self) -> EvalTotals:
        """Evaluate the network as it is now."""
        if self.world_size > 1:
            # Each process has its own running statistics; those of rank 0 are saved.
            broadcast_from_rank0_(*self.model.buffers())
        with evaluating(self.model):
            self._totals.zero_()
            state = _tensors_and_gates(self.model) if self._wants_graph else None
            if state != self._captured:
                self._graph, self._captured = None, state
            for (images, labels), weights in zip(self._batches(), self._counts, strict=True):
                self._place(images, labels, weights)
                if self._wants_graph and self._graph is None:
                    self._capture()
                if self._graph is None:
                    self._batch()
                else:
                    self._graph.replay()
        if self.world_size > 1:
            torch.distributed.all_reduce(self._totals)
        images_seen, loss, first, five = self._totals.tolist()
        top5 = 100 * five / images_seen if self._classes > 5 else None
        return EvalTotals(int(images_seen), loss / images_seen, 100 * first / images_seen, top5)

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self._loader is None:
            assert isinstance(self.data, ArrayDataset)
            for row in self._rows.to(self.device):
                yield self.data.batch(row)
        else:
            for pixels, labels in self._loader.batches(self._rows, torch.zeros_like(self._rows)):
                yield normalised(pixels, self._mean, self._std), labels

    def _place(self, images: Tensor, labels: Tensor, weights: Tensor) -> None:
        """Copy a batch into buffers of fixed address, which the graph reads."""
        if self._images is None:
            order = torch.channels_last if self.channels_last else torch.contiguous_format
            self._images = images.contiguous(memory_format=order)
        self._images.copy_(images)
        self._labels.copy_(labels)
        self._weights.copy_(weights)

    def _capture(self) -> None:
        totals = self._totals.clone()

        def restore() -> None:
            self._totals.copy_(totals)

        try:
            self._graph = capture_graph(self._batch, self.device, trial=self._batch, undo=restore)
        except Exception as error:
            logger.warning(
                "softprune: evaluation cannot run as a CUDA graph (%s: %s); it runs eagerly",
                type(error).__name__,
                error,
            )
            self._wants_graph = False
            restore()

    def _batch(self) -> None:
        assert self._images is not None
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16, cache_enabled=False):
            logits = self.model(self._images)
        self._classes = logits.shape[1]
        losses = F.cross_entropy(logits.float(), self._labels, reduction="none").double()
        best = logits.topk(min(5, self._classes), dim=1).indices == self._labels[:, None]
        first, five = best[:, 0], best.any(1)
        ones = torch.ones_like(self._weights)
        columns = torch.stack([ones, losses, first.double(), five.double()], dim=1)
        self._totals.add_((self._weights[:, None] * columns).sum(0))


class Evaluator:
    """Evaluates networks on the test images, and reuses the EvalStep while the network stays the same."""

    def __init__(self, data: DataBundle, config: RunConfig, world: World) -> None:
        self._data, self._config, self._world = data, config, world
        self._step: EvalStep | None = None

    def __call__(self, network: nn.Module, *, on_test: bool = False) -> EvalTotals:
        """Return accuracy and loss of ``network``. All processes must call this together.

        The images are the held-out ones if there are any and ``on_test`` is False, else the test images.
        """
        images = self._data.test if on_test or self._data.holdout is None else self._data.holdout
        if self._step is None or self._step.model is not network or self._step.data is not images:
            train = self._config.train
            self._step = EvalStep(
                network,
                images,
                batch_size=self._config.data.eval_batch_size,
                bf16=train.precision == "bf16" and has_fast_bf16(self._world.device),
                channels_last=train.channels_last,
                graph=train.mode != "eager",
                workers=self._config.data.workers,
                rank=self._world.rank,
                world_size=self._world.size,
            )
        return self._step()


def _tensors_and_gates(model: nn.Module) -> list[Any]:
    """Return what a captured evaluation depends on and cannot check: the addresses of tensors, and the gates."""
    state: list[Any] = [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]
    for module in model.modules():
        gate = getattr(module, "gate", None)
        if gate is not None:
            state.append(id(gate))
            for name, value in vars(gate).items():
                state.append((name, value.data_ptr() if isinstance(value, Tensor) else id(value)))
    return state


@torch.no_grad()
def latency_ms(network: nn.Module, batch: Tensor) -> float:
    """Return the time of a forward in eval mode, in milliseconds, after at most about two seconds of timing.

    On CUDA a captured forward is replayed, so that the time is the GPU's own: small networks otherwise take as long as
    Python needs to launch them.
    """
    with evaluating(network):
        call = _captured_forward(network, batch) if batch.device.type == "cuda" else lambda: network(batch)
        return time_ms(call, batch.device, rounds=30, limit=1.5)


def _captured_forward(network: nn.Module, batch: Tensor) -> Callable[[], object]:
    """Return the forward as a CUDA graph, or the plain forward if it cannot be captured."""

    def forward() -> None:
        network(batch)

    try:
        graph = capture_graph(forward, batch.device, trial=forward, undo=lambda: None)
    except RuntimeError as error:
        logger.info("the forward is timed from Python, since it cannot be captured: %s", error)
        return forward
    return lambda: graph.replay()
