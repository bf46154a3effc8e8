"""Batches of images that worker processes load ahead of their use, in an order that the caller fixes."""

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler, default_collate

from softprune.errors import DataError
from softprune.lab.data.images import BrokenImage, LoadedDataset
from softprune.log import get_logger

logger = get_logger(__name__)


def collate(items: list[tuple[Tensor, int] | BrokenImage]) -> tuple[Tensor, Tensor] | BrokenImage:
    """Return a batch, or its first image that could not be read."""
    broken = next((item for item in items if isinstance(item, BrokenImage)), None)
    if broken is not None:
        return broken
    images, labels = zip(*items, strict=True)  # type: ignore[arg-type]
    channels_last = images[0].ndim == 3 and images[0].stride(0) == 1
    if channels_last:  # stacking would change their order in memory
        images = tuple(image.permute(1, 2, 0) for image in images)
    batch: Tensor = default_collate(list(images))
    return batch.permute(0, 3, 1, 2) if channels_last else batch, torch.tensor(labels)


def broken_images(dataset: LoadedDataset, workers: int) -> Iterator[BrokenImage]:
    """Load every image once; yield those that cannot be read, or whose values are not finite."""
    items = [(index, 0) for index in range(len(dataset))]
    loader: DataLoader = DataLoader(
        dataset, 64, sampler=items, collate_fn=_checked, num_workers=_at_most_cores(workers)
    )
    for index, found in enumerate(itertools.chain.from_iterable(loader)):
        if isinstance(found, BrokenImage):
            yield found
        elif not found:
            yield BrokenImage(dataset.source(index), "It holds infinity or NaN.")


def _checked(items: list[tuple[Tensor, int] | BrokenImage]) -> list[bool | BrokenImage]:
    """Return whether each image is finite, or why it could not be read."""
    return [item if isinstance(item, BrokenImage) else bool(item[0].isfinite().all()) for item in items]


def _remove_worker_handler() -> None:
    """Remove PyTorch's SIGCHLD handler, which raises wherever the main thread is, perhaps inside a checkpoint.

    The loader itself notices a dead worker when it waits for the next batch, where the error belongs.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    handler = signal.getsignal(signal.SIGCHLD)
    if getattr(handler, "__module__", "") == "torch.utils.data._utils.signal_handling":
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _leave_signals(worker: int) -> None:
    """Ignore what a terminal sends to all its processes: the main one still needs batches, until it has saved."""
    # Forked processes have the handlers of the main one, those of macOS and of newer Pythons the default.
    for name in ("SIGINT", "SIGHUP"):
        if hasattr(signal, name):  # Windows has no SIGHUP
            signal.signal(getattr(signal, name), signal.SIG_IGN)


@cache
def _at_most_cores(workers: int) -> int:
    """Return ``workers``, or the number of cores if that is less; cached, so that a run with many loaders logs once."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if workers > cores:
        logger.info("using %d loader processes, one per core available to this process, instead of %d", cores, workers)
    return min(workers, cores)


class _Order(Sampler[list[tuple[int, int]]]):
    """The batches of the next pass; changed in place, since the workers persist from pass to pass."""

    def __init__(self) -> None:
        self.indices = torch.empty(0, 0, dtype=torch.int64)
        self.draws = self.indices

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for indices, draws in zip(self.indices, self.draws, strict=True):
            yield list(zip(indices.tolist(), draws.tolist(), strict=True))

    def __len__(self) -> int:
        return len(self.indices)


class BatchLoader:
    """Loads batches of a LoadedDataset and copies them to the device, one batch ahead of their use."""

    def __init__(self, dataset: LoadedDataset, *, workers: int, device: torch.device | str = "cpu") -> None:
        self.dataset, self.device = dataset, torch.device(device)
        workers = _at_most_cores(workers)
        self._order = _Order()
        self._loader: DataLoader = DataLoader(
            dataset,
            batch_sampler=self._order,
            collate_fn=collate,
            num_workers=workers,
            pin_memory=self.device.type == "cuda",
            persistent_workers=workers > 0,
            worker_init_fn=_leave_signals,
            # Without it the loader draws the workers' seed from the global generator, whose state must not change.
            generator=torch.Generator(),
        )
        self._copies = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def batches(self, indices: Tensor, draws: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images, as loaded, and labels on the device for each row of `indices`; `draws` has the same shape."""
        self._order.indices, self._order.draws = indices.cpu(), draws.cpu()
        waiting: tuple[Tensor, Tensor] | None = None
        for host in self._loaded():
            if isinstance(host, BrokenImage):
                raise DataError(
                    f"Every image must {host.rule}. Got {host.path}, which is not: {host.reason.removesuffix('.')}. "
                    f"{host.remedy}"
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
            _remove_worker_handler()
            yield from batches
        except Exception as error:  # for example of a worker that was killed
            # The last line of a worker's traceback is the error.
            what = f"{type(error).__name__}: {str(error).strip().rpartition(chr(10))[2]}"
            raise DataError(
                f"Loader processes must return every batch. Got {what}. If a loader process was killed, memory may "
                "be exhausted: free some, or start a run with fewer data.workers."
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
