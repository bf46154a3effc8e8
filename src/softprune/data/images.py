"""Images in files: decoded, cropped and read ahead by worker processes, in an order that the caller fixes."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from softprune.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

log = logging.getLogger(__name__)

IMAGENET_MEAN = (123.675, 116.28, 103.53)
"""Mean of ImageNet's colours, in units of stored bytes."""
IMAGENET_STD = (58.395, 57.12, 57.375)
"""Standard deviation of ImageNet's colours, in units of stored bytes."""
# The decoders that may read an image, whatever its name says: others, such as EPS, start programs.
_FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "PPM", "TIFF")
_MOST_PIXELS = 2**26
"""Pixels of an image, as stored and as resized: a small file can hold any number."""
# The usual ranges of a random crop: its share of the image's area, and the ratio of its sides.
_CROP_AREA = (0.08, 1.0)
_CROP_RATIO = (3 / 4, 4 / 3)
_CROP_TRIES = 10


@dataclass(frozen=True)
class BrokenImage:
    """What a worker returns in place of an image that it could not read."""

    path: str
    reason: str


class LoadedDataset(torch.utils.data.Dataset[Any]):
    """Images that worker processes load. An item is (image (C, H, W), label), or BrokenImage.

    Items are requested as (index, draw), where `draw` counts the images requested since training began. Seed and draw
    alone determine what is random, so there is no generator whose state must be saved.
    """

    mean: tuple[float, ...] = IMAGENET_MEAN
    """Mean of each channel, in units of the loaded values."""
    std: tuple[float, ...] = IMAGENET_STD
    """Standard deviation of each channel, in units of the loaded values."""
    dtype: torch.dtype = torch.uint8
    """Type of the loaded values."""

    def __len__(self) -> int:
        raise NotImplementedError

    def constants(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation as tensors of shape (C, 1, 1)."""
        mean, std = (torch.tensor(values, device=device).view(-1, 1, 1) for values in (self.mean, self.std))
        return mean, std

    def subset(self, indices: Tensor, *, augment: bool = True) -> LoadedDataset:
        """Return the images with these indices; `augment=False` removes softprune's augmentation."""
        return _Subset(self, indices)


class _Subset(LoadedDataset):
    def __init__(self, dataset: LoadedDataset, indices: Tensor) -> None:
        self.dataset, self.indices = dataset, indices.numpy()
        self.mean, self.std, self.dtype = dataset.mean, dataset.std, dataset.dtype

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, item: tuple[int, int]) -> Any:
        return self.dataset[int(self.indices[item[0]]), item[1]]


@dataclass(frozen=True, kw_only=True)
class Crops:
    """How images in files become inputs of the network."""

    size: int
    """Side of the square."""
    seed: int = 0
    """Seeds everything random."""
    augment: bool = True
    """Crop and flip at random, instead of taking the centre."""
    randaugment: int = 0
    """Magnitude of RandAugment with two operations per image; 0 for none."""


class FolderDataset(LoadedDataset):
    """One split of an image folder, as uint8 images (3, size, size)."""

    def __init__(self, root: Path, files: np.ndarray, labels: Tensor, crops: Crops) -> None:
        self.root, self.labels, self.crops = root, labels, crops
        # One array instead of a million Python strings, whose reference counts would make forked workers copy them.
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def subset(self, indices: Tensor, *, augment: bool = True) -> FolderDataset:
        crops = replace(self.crops, augment=self.crops.augment and augment)
        return FolderDataset(self.root, self._files[indices.numpy()], self.labels[indices], crops)

    def path(self, index: int) -> Path:
        """Return the file of an image."""
        return self.root / os.fsdecode(self._files[index])

    def __getitem__(self, item: tuple[int, int]) -> tuple[Tensor, int] | BrokenImage:
        from torchvision.transforms.v2 import functional as transforms

        index, draw = item
        path = self.path(index)
        try:
            image = open_image(path)
            if self.crops.augment:
                image = self._augmented(image, draw, transforms)
            else:
                image = evaluation_crop(image, self.crops.size)
            return transforms.pil_to_tensor(image), int(self.labels[index])
        except MemoryError:
            raise  # not the image's fault
        except Exception as error:  # decoders raise nearly anything, resizing at odd shapes
            return BrokenImage(str(path), str(error) or type(error).__name__)

    def _augmented(self, image: Image, draw: int, transforms: Any) -> Image:
        size, magnitude = self.crops.size, self.crops.randaugment
        chance = random.Random((self.crops.seed << 64) + draw)
        top, left, height, width = _crop(image.height, image.width, chance)
        image = transforms.resized_crop(image, top, left, height, width, [size, size])
        if chance.random() < 0.5:
            image = transforms.horizontal_flip(image)
        if magnitude:
            from torchvision.transforms.v2 import RandAugment

            with seeded(chance.getrandbits(63)):
                image = RandAugment(num_ops=2, magnitude=magnitude)(image)
        return image


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators of torch, Python and NumPy within the block, and restore them afterwards."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  (transforms use the global generator)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])  # noqa: NPY002


def evaluation_crop(image: Image, size: int) -> Image:
    """Return the central square of an image, as the networks are tested on it."""
    from torchvision.transforms.v2 import functional as transforms

    short = round(size * 256 / 224)
    if short * short * max(image.size) > _MOST_PIXELS * min(image.size):
        raise DataError(
            f"its sides of {image.width} and {image.height} pixels are too different for a square crop"
        )
    return transforms.center_crop(transforms.resize(image, [short]), [size])


def open_image(path: Path, mode: str = "RGB") -> Image:
    """Return an image file in a mode of Pillow. Decoders raise nearly anything where the file is damaged."""
    from PIL import Image

    if not path.is_file():  # opening a fifo would block
        raise DataError("it is missing or not a regular file")
    with Image.open(path, formats=_FORMATS) as image:
        if image.width * image.height > _MOST_PIXELS:
            raise DataError(f"it has {image.width} x {image.height} pixels, more than {_MOST_PIXELS:,}")
        return image.convert(mode)


def _crop(height: int, width: int, chance: random.Random) -> tuple[int, int, int, int]:
    """Return top, left, height and width of a random crop, with ImageNet's usual area and ratio, or of the centre."""
    for _ in range(_CROP_TRIES):
        area = height * width * chance.uniform(*_CROP_AREA)
        ratio = np.exp(chance.uniform(*np.log(_CROP_RATIO)))
        w, h = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 0 < w <= width and 0 < h <= height:
            return chance.randint(0, height - h), chance.randint(0, width - w), h, w
    w = min(width, round(height * _CROP_RATIO[1]))
    h = min(height, round(width / _CROP_RATIO[0]))
    return (height - h) // 2, (width - w) // 2, h, w


def collate(items: list[tuple[Tensor, int] | BrokenImage]) -> tuple[Tensor, Tensor] | BrokenImage:
    """Return a batch, or its first image that could not be read."""
    images, labels = [], []
    for item in items:
        if isinstance(item, BrokenImage):
            return item
        images.append(item[0])
        labels.append(item[1])
    return torch.stack(images), torch.tensor(labels)


def _remove_worker_handler() -> None:
    """Remove PyTorch's SIGCHLD handler, which raises wherever the main thread is, perhaps inside a checkpoint.

    The loader itself notices a dead worker when it waits for the next batch, where the error belongs.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    handler = signal.getsignal(signal.SIGCHLD)
    if getattr(handler, "__module__", "") == "torch.utils.data._utils.signal_handling":
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


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
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if workers > cores:
            log.info(
                "using %d loader processes, one per core available to this process, instead of %d",
                cores,
                workers,
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
                    f"Every image must be readable. Got {host.path}, which is not: {host.reason}. "
                    "Replace the file and resume; without it the data set is another one and needs a new run."
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
