"""Map-style torch data sets, whose images worker processes load batch by batch."""

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
"""Per channel, in units of uint8 pixel values."""


class LoadedDataset(Dataset[Any]):
    """Adapts a map-style torch data set whose items are (image, class index).

    Images are tensors (C, H, W), arrays (H, W, C) or PIL images, all with the shape and dtype of the first one. Only
    uint8 images are normalised: with ImageNet's constants if they have three channels, otherwise to [-1, 1].

    Items are requested as (index, draw), where `draw` counts the images since training began. The random generators
    are seeded by (seed, draw), so that a resumed run sees the same augmented images.

    Args:
        plain: The same data set without augmentation, for held-out images; None if the data set has no augmentation.
    """

    def __init__(self, dataset: Any, *, num_classes: int, seed: int = 0, plain: Any = None) -> None:
        self.dataset, self.plain = dataset, dataset if plain is None else plain
        self.num_classes, self.seed = num_classes, seed
        first, _ = self[0, 0]
        self.shape, self.dtype = tuple(first.shape), first.dtype
        # In units of the loaded pixel values.
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
                raise DataError(f"a label must be an integer from 0 to {self.num_classes - 1}; got {label}")
            return image, int(label)
        except Exception as error:  # decoders and transforms raise nearly anything
            reason = (str(error) or type(error).__name__).splitlines()[0].removesuffix(".")
            raise DataError(
                f"Every image and label must be readable. Got an error in {self._source(index)}: {reason}. Replace the "
                "image and resume. If you remove it, the data set changes, which needs a new run."
            ) from error

    def _source(self, index: int) -> str:
        data = self.dataset
        while isinstance(data, Subset):
            index, data = int(data.indices[index]), data.dataset
        samples = getattr(data, "samples", None)  # of torchvision's ImageFolder
        return str(samples[index][0]) if isinstance(samples, list) else f"item {index} of {type(data).__name__}"

    def subset(self, indices: Tensor, *, augment: bool = True) -> "LoadedDataset":
        """Return the images with these indices."""
        chosen: list[int] = indices.tolist()
        plain = Subset(self.plain, chosen)
        dataset = Subset(self.dataset, chosen) if augment else plain
        return LoadedDataset(dataset, num_classes=self.num_classes, seed=self.seed, plain=plain)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the global generators of PyTorch, Python and NumPy within the block; restore their states afterwards."""
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
    """Ignore signals that a terminal sends to all processes: the main process needs batches until it has saved."""
    for name in ("SIGINT", "SIGHUP"):
        if hasattr(signal, name):  # Windows has no SIGHUP
            signal.signal(getattr(signal, name), signal.SIG_IGN)


class BatchLoader:
    """Loads batches in worker processes, at most one per core, in the order given by the caller."""

    def __init__(self, dataset: LoadedDataset, *, workers: int, device: torch.device | str = "cpu") -> None:
        self.dataset, self.device = dataset, torch.device(device)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        # Batches of the next pass. Changed in place, since the DataLoader and its workers are kept between passes.
        self._items: list[Any] = []
        self._loader: DataLoader = DataLoader(
            dataset,
            batch_sampler=self._items,
            num_workers=min(workers, cores),
            pin_memory=self.device.type == "cuda",
            persistent_workers=min(workers, cores) > 0,
            worker_init_fn=_leave_signals,
            # By default the workers' seed is drawn from the global generator, whose state must not change.
            generator=torch.Generator(),
        )

    def batches(self, indices: Iterable[Tensor], draws: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield unnormalised images and labels on the device for each row of `indices`."""
        self._items[:] = [torch.stack(row, dim=-1).numpy() for row in zip(indices, draws, strict=True)]
        try:
            for images, labels in self._loader:
                yield images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)
        except DataError as error:  # an error from a worker ends with the original message
            raise DataError(
                str(error).strip().rpartition("\n")[2].removeprefix("softprune.errors.DataError: ")
            ) from error


class LoaderBatches:
    """Batches from worker processes, copied into buffers at fixed addresses. Same interface as ArrayBatches.

    Images are copied to the device as loaded, usually uint8, a quarter of the traffic of float32, and normalised there.
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
    """Load all images once and return them as an ArrayDataset on the device."""
    images = torch.empty(len(data), *data.shape, dtype=data.dtype, device=device)
    rows, labels = torch.arange(len(data)).split(250), []
    for row, (pixels, numbers) in zip(rows, BatchLoader(data, workers=workers).batches(rows, rows), strict=True):
        images[row[0] : row[-1] + 1] = pixels
        labels.append(numbers)
    return ArrayDataset(images, torch.cat(labels).to(device), data.mean.to(device), data.std.to(device))
