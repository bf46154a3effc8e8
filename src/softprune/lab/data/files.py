"""Images that are loaded when their batch is due: items of torch data sets, and folders of images by torchvision."""

import copy
import os
import random
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, Subset

from softprune.errors import DataError, first_few, import_optional
from softprune.lab.data.arrays import ArrayDataset, EpochSampler, normalised
from softprune.rng import Clock

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
_FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "PPM", "TIFF")
"""The decoders that may read an image, whatever its name says: others, such as EPS, start programs."""
_MEAN, _STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
"""ImageNet's, in units of stored bytes."""


class LoadedDataset(Dataset[Any]):
    """Adapts a map-style torch data set whose items are (image, label), an image and the number of its class.

    An image is a tensor (C, H, W), an array (H, W, C) or a PIL image, all of one shape and type. Bytes are normalised
    with ImageNet's constants if they have three channels, else to [-1, 1]; floats are used as they are.

    Items are requested as (index, draw), where `draw` counts the images requested since training began. The random
    generators are seeded by (seed, draw), so that a resumed run sees the same augmented images.

    Args:
        plain: The same images without augmentation, for those that are held out; None if there is no difference.
        kind: Shape and type of the images; None to load the first one, which has those of all.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        num_classes: int,
        seed: int = 0,
        plain: Any = None,
        kind: tuple[tuple[int, ...], torch.dtype] | None = None,
    ) -> None:
        self.dataset, self.num_classes, self.seed = dataset, num_classes, seed
        self.plain, self.kind = dataset if plain is None else plain, kind
        if kind is None:
            image, _ = self[0, 0]
            self.kind = tuple(image.shape), image.dtype
        assert self.kind is not None
        self.shape, self.dtype = self.kind
        # In units of the loaded values.
        mean, std = (_MEAN, _STD) if self.shape[0] == 3 else (127.5, 127.5)
        if self.dtype != torch.uint8:
            mean, std = 0.0, 1.0
        self.mean, self.std = (torch.tensor(value).expand(self.shape[0]).view(-1, 1, 1) for value in (mean, std))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, item: tuple[int, int]) -> tuple[Tensor, int]:
        index, draw = item
        try:
            with _seeded(random.Random((self.seed << 64) + draw).getrandbits(63)):
                image, label = self.dataset[index]
            return self._image(image), self._label(label)
        except Exception as error:  # decoders and transforms raise nearly anything
            reason = (str(error) or type(error).__name__).splitlines()[0].removesuffix(".")
            raise DataError(
                f"Every image must be readable, with its label. Got {self._source(index)}, which is not: {reason}. "
                "Replace it and resume; without it the data set is another one and needs a new run."
            ) from error

    def _image(self, image: Any) -> Tensor:
        if not isinstance(image, Tensor):
            image = torch.from_numpy(np.array(image))
            image = image.permute(2, 0, 1).contiguous() if image.ndim == 3 else image.unsqueeze(0)
        if image.ndim != 3 or (image.dtype != torch.uint8 and not image.is_floating_point()):
            raise DataError(
                "an image must be a tensor (C, H, W) or an array (H, W, C) of bytes or floats, or a PIL image; "
                f"got {image.dtype} of shape {tuple(image.shape)}"
            )
        if self.kind not in (None, (tuple(image.shape), image.dtype)):
            raise DataError(
                f"all images must have one shape and type; got {tuple(image.shape)} of {image.dtype}, and "
                "{} of {} of the first one: resize and convert them".format(*self.kind)
            )
        return image

    def _label(self, label: Any) -> int:
        number = int(label)
        if number != label or not 0 <= number < self.num_classes:
            raise DataError(f"a label must be a number from 0 to {self.num_classes - 1}; got {label}")
        return number

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
        kind = self.kind if augment or self.plain is self.dataset else None
        return LoadedDataset(dataset, num_classes=self.num_classes, seed=self.seed, plain=plain, kind=kind)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
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


class _Rows(Sampler[list[tuple[int, int]]]):
    """The batches of the next pass; changed in place, since the workers persist from pass to pass."""

    def __init__(self) -> None:
        self.rows: list[tuple[Tensor, Tensor]] = []

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for indices, draws in self.rows:
            yield list(zip(indices.tolist(), draws.tolist(), strict=True))

    def __len__(self) -> int:
        return len(self.rows)


def _leave_signals(worker: int) -> None:
    """Ignore what a terminal sends to all its processes: the main one still needs batches, until it has saved."""
    for name in ("SIGINT", "SIGHUP"):
        if hasattr(signal, name):  # Windows has no SIGHUP
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def _remove_worker_handler() -> None:
    """Remove PyTorch's SIGCHLD handler, which raises wherever the main thread is, perhaps inside a checkpoint.

    The loader itself notices a dead worker when it waits for the next batch, where the error belongs.
    """
    if threading.current_thread() is not threading.main_thread():
        return  # which alone may set handlers
    handler = signal.getsignal(signal.SIGCHLD)
    if getattr(handler, "__module__", "") == "torch.utils.data._utils.signal_handling":
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


class BatchLoader:
    """Loads batches in worker processes, at most one for each core, in an order that the caller fixes."""

    def __init__(self, dataset: LoadedDataset, *, workers: int, device: torch.device | str = "cpu") -> None:
        self.dataset, self.device = dataset, torch.device(device)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._rows = _Rows()
        self._loader: DataLoader = DataLoader(
            dataset,
            batch_sampler=self._rows,
            num_workers=min(workers, cores),
            pin_memory=self.device.type == "cuda",
            persistent_workers=min(workers, cores) > 0,
            worker_init_fn=_leave_signals,
            # Without it the loader draws the workers' seed from the global generator, whose state must not change.
            generator=torch.Generator(),
        )

    def batches(self, indices: Iterable[Tensor], draws: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images, as loaded, and labels on the device for each row of `indices`."""
        self._rows.rows = list(zip(indices, draws, strict=True))
        try:
            batches = iter(self._loader)
            _remove_worker_handler()
            for images, labels in batches:
                yield images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)
        except DataError as error:  # from a worker, its last line is the message
            raise DataError(
                str(error).strip().rpartition("\n")[2].removeprefix("softprune.errors.DataError: ")
            ) from error
        except RuntimeError as error:
            raise DataError(
                f"Loader processes must return every batch. Got {str(error).splitlines()[0].removesuffix('.')}. If "
                "memory is exhausted, free some, or set fewer data.workers in config.toml."
            ) from error


class LoaderBatches:
    """Batches from worker processes, copied into buffers of fixed address. Its members are those of ArrayBatches.

    They arrive as loaded, usually bytes, a quarter of the traffic of floats, and are normalised on the device.
    """

    def __init__(self, loader: BatchLoader, sampler: EpochSampler) -> None:
        self.loader, self.sampler, self.device = loader, sampler, loader.device
        self.image_shape = loader.dataset.shape
        count = sampler.local_batch
        images = torch.zeros(count, *self.image_shape, dtype=loader.dataset.dtype, device=self.device)
        labels = torch.zeros(count, dtype=torch.int64, device=self.device)
        self._buffers = images, labels
        self._mean, self._std = loader.dataset.mean.to(self.device), loader.dataset.std.to(self.device)
        self._order = torch.empty(0, 0, dtype=torch.int64)
        self._coming: Iterator[tuple[Tensor, Tensor]] = iter(())

    def begin(self, epoch: int, start: int) -> None:
        self._order = self.sampler.indices(epoch)
        self._coming = self.loader.batches(self._order[start:], self.sampler.draws(epoch)[start:])

    def before_step(self) -> None:
        for buffer, content in zip(self._buffers, next(self._coming), strict=True):
            buffer.copy_(content)

    def indices(self, position: int) -> list[int]:
        return self._order[position].tolist()

    def rows(self, position: Tensor) -> tuple[Tensor, Tensor]:
        return self._buffers

    def batch(self, first: Tensor, second: Tensor, clock: Clock) -> tuple[Tensor, Tensor]:
        return normalised(first, self._mean, self._std), second


def load_folder(
    root: Path, *, size: int, seed: int, augment: bool, randaugment: int, erasing: float, whole: bool
) -> tuple[LoadedDataset, LoadedDataset, tuple[str, ...]]:
    """Return training and test images of a folder in the ImageNet layout, and the names of its classes.

    With ``whole``, augmented training images are not cropped: the device does it.
    """
    import_optional("torchvision", "data.name = folder", error=DataError)
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    centre = v2.Compose([*evaluation_crop(size), v2.PILToTensor()])
    steps: list[Any] = [v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()]
    if randaugment:
        steps.append(v2.RandAugment(num_ops=2, magnitude=randaugment))
    steps.append(v2.PILToTensor())
    if erasing:
        steps.append(v2.RandomErasing(erasing, value=[round(value) for value in _MEAN]))
    try:
        plain, test = (
            ImageFolder(str(root / split), centre, loader=read_image, is_valid_file=is_image)
            for split in ("train", "val")
        )
    except OSError as error:
        raise DataError(
            f"Images in folders need {root}/train and {root}/val, each with a folder of images for each class "
            f"({', '.join(SUFFIXES)}). Got {str(error).strip()}"
        ) from error
    if plain.classes != test.classes:
        differing = sorted(set(plain.classes) ^ set(test.classes))
        raise DataError(
            f"{root}/train and {root}/val must have the same class folders. Got {first_few(differing)} only in one of "
            "them; give each class images in both, or remove it."
        )
    train = plain
    if augment:
        train = copy.copy(plain)  # the list of its files is long
        train.transform = v2.PILToTensor() if whole else v2.Compose(steps)
    count, kind = len(plain.classes), ((3, size, size), torch.uint8)
    return (
        LoadedDataset(train, num_classes=count, seed=seed, plain=plain, kind=None if whole and augment else kind),
        LoadedDataset(test, num_classes=count, seed=seed, kind=kind),
        tuple(plain.classes),
    )


def is_image(path: str) -> bool:
    """Return whether a path has the suffix of an image and is not hidden."""
    # A hidden file is not the user's: macOS adds "._NAME.jpg", which holds no image, to archives.
    return not os.path.basename(path).startswith(".") and path.lower().endswith(SUFFIXES)


def read_image(path: str | Path, mode: str = "RGB") -> Any:
    """Return an image file as a PIL image in this mode, as stored: EXIF's orientation is not applied."""
    from PIL import Image

    if not os.path.isfile(path):  # opening a fifo would block
        raise DataError("it is missing or not a regular file")
    with Image.open(path, formats=_FORMATS) as image:
        return image.convert(mode)


def evaluation_crop(size: int) -> list[Any]:
    """Return the transforms that take the central square of an image, as the networks are tested on it."""
    from torchvision.transforms import v2

    return [v2.Resize(round(size * 256 / 224)), v2.CenterCrop(size)]


def keep_on_device(data: LoadedDataset, device: torch.device | str, workers: int) -> ArrayDataset:
    """Load every image once, and keep them on the device."""
    images = torch.empty(len(data), *data.shape, dtype=data.dtype, device=device)
    rows = torch.arange(len(data)).split(250)
    labels = []
    for row, (pixels, numbers) in zip(rows, BatchLoader(data, workers=workers).batches(rows, rows), strict=True):
        images[row[0] : row[-1] + 1] = pixels
        labels.append(numbers)
    return ArrayDataset(images, torch.cat(labels).to(device), data.mean.to(device), data.std.to(device))
