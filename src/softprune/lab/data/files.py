"""Images that are loaded when their batch is due: items of torch data sets, in worker processes."""

import os
import random
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from softprune.errors import DataError
from softprune.lab.data.arrays import ArrayDataset, EpochSampler, normalised
from softprune.rng import Clock

IMAGENET_MEAN, _STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
"""In units of stored bytes."""


class LoadedDataset(Dataset[Any]):
    """Adapts a map-style torch data set whose items are (image, label), an image and the number of its class.

    An image is a tensor (C, H, W), an array (H, W, C) or a PIL image, all of the shape and type of the first one. Bytes
    are normalised with ImageNet's constants if they have three channels, else to [-1, 1]; floats are used as they are.

    Items are requested as (index, draw), where `draw` counts the images requested since training began. The random
    generators are seeded by (seed, draw), so that a resumed run sees the same augmented images.

    Args:
        plain: The same images without augmentation, for those that are held out; None if there is no difference.
    """

    def __init__(self, dataset: Any, *, num_classes: int, seed: int = 0, plain: Any = None) -> None:
        self.dataset, self.plain = dataset, dataset if plain is None else plain
        self.num_classes, self.seed = num_classes, seed
        first, _ = self[0, 0]
        self.shape, self.dtype = tuple(first.shape), first.dtype
        # In units of the loaded values.
        mean, std = (IMAGENET_MEAN, _STD) if self.shape[0] == 3 else (127.5, 127.5)
        if self.dtype != torch.uint8:
            mean, std = 0.0, 1.0
        self.mean, self.std = (torch.tensor(value).expand(self.shape[0]).view(-1, 1, 1) for value in (mean, std))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, item: Iterable[int]) -> tuple[Tensor, int]:
        index, draw = map(int, item)
        try:
            with _seeded(random.Random((self.seed << 64) + draw).getrandbits(63)):
                image, label = self.dataset[index]
            if not isinstance(image, Tensor):
                image = torch.from_numpy(np.array(image))
                image = image.permute(2, 0, 1).contiguous() if image.ndim == 3 else image.unsqueeze(0)
            if int(label) != label or not 0 <= label < self.num_classes:
                raise DataError(f"a label must be a number from 0 to {self.num_classes - 1}; got {label}")
            return image, int(label)
        except Exception as error:  # decoders and transforms raise nearly anything
            reason = (str(error) or type(error).__name__).splitlines()[0].removesuffix(".")
            raise DataError(
                f"Every image must be readable, with its label. Got {self._source(index)}, which is not: {reason}. "
                "Replace it and resume; without it the data set is another one and needs a new run."
            ) from error

    def _source(self, index: int) -> str:
        data = self.dataset
        while isinstance(data, Subset):
            index, data = int(data.indices[index]), data.dataset
        samples = getattr(data, "samples", None)  # of torchvision's folders
        return str(samples[index][0]) if isinstance(samples, list) else f"item {index} of {type(data).__name__}"

    def subset(self, indices: Tensor, *, augment: bool = True) -> "LoadedDataset":
        """Return the images with these indices."""
        chosen: list[int] = indices.tolist()
        plain = Subset(self.plain, chosen)
        dataset = Subset(self.dataset, chosen) if augment else plain
        return LoadedDataset(dataset, num_classes=self.num_classes, seed=self.seed, plain=plain)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the global generators of torch, Python and NumPy within the block, and restore them afterwards."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  (transforms use the global generator)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002


def _leave_signals(worker: int) -> None:
    """Ignore what a terminal sends to all its processes: the main one still needs batches, until it has saved."""
    for name in ("SIGINT", "SIGHUP"):
        if hasattr(signal, name):  # Windows has no SIGHUP
            signal.signal(getattr(signal, name), signal.SIG_IGN)


class BatchLoader:
    """Loads batches in worker processes, at most one for each core, in an order that the caller fixes."""

    def __init__(self, dataset: LoadedDataset, *, workers: int, device: torch.device | str = "cpu") -> None:
        self.dataset, self.device = dataset, torch.device(device)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        # The batches of the next pass; changed in place, since the workers persist from pass to pass.
        self._items: list[Any] = []
        self._loader: DataLoader = DataLoader(
            dataset,
            batch_sampler=self._items,
            num_workers=min(workers, cores),
            pin_memory=self.device.type == "cuda",
            persistent_workers=min(workers, cores) > 0,
            worker_init_fn=_leave_signals,
            # Without it the loader draws the workers' seed from the global generator, whose state must not change.
            generator=torch.Generator(),
        )

    def batches(self, indices: Iterable[Tensor], draws: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images, as loaded, and labels on the device for each row of `indices`."""
        self._items[:] = [torch.stack(row, dim=-1).numpy() for row in zip(indices, draws, strict=True)]
        try:
            for images, labels in self._loader:
                yield images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)
        except DataError as error:  # from a worker, its last line is the message
            raise DataError(
                str(error).strip().rpartition("\n")[2].removeprefix("softprune.errors.DataError: ")
            ) from error


class LoaderBatches:
    """Batches from worker processes, copied into buffers of fixed address. Its members are those of ArrayBatches.

    They arrive as loaded, usually bytes, a quarter of the traffic of floats, and are normalised on the device.
    """

    def __init__(self, loader: BatchLoader, sampler: EpochSampler) -> None:
        self.loader, self.sampler, self.device = loader, sampler, loader.device
        data, count = loader.dataset, sampler.local_batch
        images = torch.zeros(count, *data.shape, dtype=data.dtype, device=self.device)
        self._buffers = images, torch.zeros(count, dtype=torch.int64, device=self.device)
        self._mean, self._std = data.mean.to(self.device), data.std.to(self.device)
        self._coming: Iterator[tuple[Tensor, Tensor]] = iter(())

    def begin(self, epoch: int, start: int) -> None:
        self._coming = self.loader.batches(self.sampler.indices(epoch)[start:], self.sampler.draws(epoch)[start:])

    def before_step(self) -> None:
        for buffer, content in zip(self._buffers, next(self._coming), strict=True):
            buffer.copy_(content)

    def batch(self, position: Tensor, clock: Clock) -> tuple[Tensor, Tensor]:
        images, labels = self._buffers
        return normalised(images, self._mean, self._std), labels


def keep_on_device(data: LoadedDataset, device: torch.device | str, workers: int) -> ArrayDataset:
    """Load every image once, and keep them on the device."""
    images = torch.empty(len(data), *data.shape, dtype=data.dtype, device=device)
    rows, labels = torch.arange(len(data)).split(250), []
    for row, (pixels, numbers) in zip(rows, BatchLoader(data, workers=workers).batches(rows, rows), strict=True):
        images[row[0] : row[-1] + 1] = pixels
        labels.append(numbers)
    return ArrayDataset(images, torch.cat(labels).to(device), data.mean.to(device), data.std.to(device))
