"""Batches of images from folders: read ahead by worker processes, in an order that the caller fixes."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from softprune.data.folder import BrokenImage, FolderDataset, collate
from softprune.errors import DataError

log = logging.getLogger(__name__)


def _let_workers_end_quietly() -> None:
    """Take PyTorch's handler of ended workers away: it raises wherever the main thread is, perhaps in mid-checkpoint.

    The loader itself notices an ended worker when it waits for its next batch, where the error belongs.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    handler = signal.getsignal(signal.SIGCHLD)
    if getattr(handler, "__module__", "") == "torch.utils.data._utils.signal_handling":
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


class _Order(Sampler[list[tuple[int, int]]]):
    """The batches of the pass that comes next; changed in place, since the workers stay from pass to pass."""

    def __init__(self) -> None:
        self.indices = torch.empty(0, 0, dtype=torch.int64)
        self.draws = self.indices

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for indices, draws in zip(self.indices, self.draws, strict=True):
            yield list(zip(indices.tolist(), draws.tolist(), strict=True))

    def __len__(self) -> int:
        return len(self.indices)


class FolderLoader:
    """Loads batches of a FolderDataset and puts them on the device, one batch ahead of their use."""

    def __init__(self, dataset: FolderDataset, *, workers: int, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if workers > cores:
            log.info(
                "using %d loader processes, one per core that this process may use, not %d", cores, workers
            )
            workers = cores
        self._order = _Order()
        self._loader: DataLoader = DataLoader(
            dataset,
            batch_sampler=self._order,
            collate_fn=collate,
            num_workers=workers,
            pin_memory=self.device.type == "cuda",
            persistent_workers=workers > 0,
            # Without it the loader draws its workers' seed from the global generator, which must not move.
            generator=torch.Generator(),
        )
        self._copies = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def batches(self, indices: Tensor, draws: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Images (uint8) and labels on the device for each row of `indices`; `draws` has the same shape."""
        self._order.indices, self._order.draws = indices.cpu(), draws.cpu()
        waiting: tuple[Tensor, Tensor] | None = None
        for host in self._loaded():
            if isinstance(host, BrokenImage):
                raise DataError(
                    f"Every image must be readable. Got {host.path}, which is not: {host.reason}. "
                    "Replace it and go on; without it the data set is another one, and needs a new run."
                )
            coming = self._send(*host)
            if waiting is not None:
                yield self._arrived(waiting)
            waiting = coming
        if waiting is not None:
            yield self._arrived(waiting)

    def _loaded(self) -> Iterator[tuple[Tensor, Tensor] | BrokenImage]:
        try:
            batches = iter(self._loader)
            _let_workers_end_quietly()
            yield from batches
        except Exception as error:  # of a worker that was killed, for one
            # A worker's traceback ends with what went wrong.
            what = f"{type(error).__name__}: {str(error).strip().rpartition(chr(10))[2]}"
            raise DataError(
                f"Every batch must come out of the loader. Got {what}. If a loader process was killed, memory may "
                "have run out: free some, or begin a run with fewer data.workers."
            ) from error

    def _send(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if self._copies is None:
            return images.to(self.device), labels.to(self.device)
        with torch.cuda.stream(self._copies):
            return images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)

    def _arrived(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        if self._copies is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_stream(self._copies)
            for tensor in batch:
                tensor.record_stream(stream)
        return batch
