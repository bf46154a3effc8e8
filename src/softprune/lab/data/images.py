"""Images that are decoded and cropped when their batch is due: files in folders, and what other sources build on.

Pillow decodes and resizes. Its results are those of torchvision's transforms for Pillow images, at a lower cost for
small images, and torchvision is not imported in every worker.
"""

from __future__ import annotations

import copy
import os
import random
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from softprune.errors import DataError
from softprune.lab.data.augment import ERASING_DRAWS, erased_pixels, random_box

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGENET_MEAN = (123.675, 116.28, 103.53)
"""Mean of ImageNet's colours, in units of stored bytes."""
IMAGENET_STD = (58.395, 57.12, 57.375)
"""Standard deviation of ImageNet's colours, in units of stored bytes."""


def byte_constants(channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation for bytes: ImageNet's for three channels, else those that give [-1, 1]."""
    return (IMAGENET_MEAN, IMAGENET_STD) if channels == 3 else ((127.5,) * channels, (127.5,) * channels)


# The decoders that may read an image, whatever its name says: others, such as EPS, start programs.
_FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "PPM", "TIFF")
_MOST_PIXELS = 2**26
"""Pixels of an image, as stored and as resized: a small file can hold any number."""
MOST_BYTES = 2**28
"""Bytes of an encoded image."""


@dataclass(frozen=True)
class BrokenImage:
    """What a worker returns in place of an image that it could not read."""

    path: str
    reason: str
    rule: str = "be readable, with its label"
    remedy: str = "Replace it and resume; without it the data set is another one and needs a new run."


class LoadedDataset(torch.utils.data.Dataset[Any]):
    """Images (C, H, W) that worker processes load. An item is (image, label), or BrokenImage.

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

    def load(self, index: int, draw: int) -> tuple[Tensor, int]:
        """Return an image, as loaded, and its label."""
        raise NotImplementedError

    def source(self, index: int) -> str:
        """Return where an image is, for messages."""
        return f"item {index} of {type(self).__name__}"

    def __getitem__(self, item: tuple[int, int]) -> tuple[Tensor, int] | BrokenImage:
        index, draw = item
        try:
            return self.load(index, draw)
        except MemoryError:
            raise  # not the image's fault
        except Exception as error:  # decoders raise nearly anything, resizing at odd shapes
            return BrokenImage(self.source(index), str(error) or type(error).__name__)

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
    erasing: float = 0.0
    """Probability that a random rectangle of the image is set to the mean colour."""


class EncodedDataset(LoadedDataset):
    """Encoded images from any source, as uint8 images (3, size, size). A subclass says where the bytes are.

    `rows` has an entry for each image, with which the subclass finds it. It is an array instead of a million Python
    objects, whose reference counts would make forked workers copy them.
    """

    def __init__(self, rows: np.ndarray, labels: Tensor, crops: Crops) -> None:
        self.rows, self.labels, self.crops = rows, labels, crops

    @abstractmethod
    def read(self, index: int) -> bytes:
        """Return the encoded image."""

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, indices: Tensor, *, augment: bool = True) -> Self:
        part = copy.copy(self)
        part.rows, part.labels = self.rows[indices.numpy()], self.labels[indices]
        part.crops = replace(self.crops, augment=self.crops.augment and augment)
        return part

    def load(self, index: int, draw: int) -> tuple[Tensor, int]:
        image = decode_image(self.read(index))
        if self.crops.augment:
            pixels = self._augmented(image, random.Random((self.crops.seed << 64) + draw))
        else:
            pixels = image_tensor(evaluation_crop(image, self.crops.size))
        return pixels, int(self.labels[index])

    def _augmented(self, image: Image, chance: random.Random) -> Tensor:
        from PIL.Image import Resampling, Transpose

        size, magnitude = self.crops.size, self.crops.randaugment
        top, left, height, width = random_box(image.height, image.width, chance)
        image = image.crop((left, top, left + width, top + height)).resize((size, size), Resampling.BILINEAR)
        if chance.random() < 0.5:
            image = image.transpose(Transpose.FLIP_LEFT_RIGHT)
        if magnitude:
            from torchvision.transforms.v2 import RandAugment

            with seeded(chance.getrandbits(63)):
                image = RandAugment(num_ops=2, magnitude=magnitude)(image)
        pixels = image_tensor(image)
        if self.crops.erasing:
            u = torch.tensor([[chance.random()] for _ in range(ERASING_DRAWS)])
            colour = torch.tensor(self.mean).round().to(pixels.dtype).view(-1, 1, 1)
            pixels = torch.where(erased_pixels(u, self.crops.erasing, size, size), colour, pixels)
        return pixels


class FolderDataset(EncodedDataset):
    """One split of an image folder."""

    def __init__(self, root: Path, files: np.ndarray, labels: Tensor, crops: Crops) -> None:
        super().__init__(files, labels, crops)
        self.root = root

    def path(self, index: int) -> Path:
        return self.root / os.fsdecode(self.rows[index])

    def read(self, index: int) -> bytes:
        return read_image(self.path(index))

    def source(self, index: int) -> str:
        return str(self.path(index))


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


def normalised(pixels: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return stored values as the network's input, in float32."""
    values = pixels.to(torch.float32, copy=True)  # the only new tensor: on a CPU, fresh memory costs most of the time
    by_rows = values.ndim == 4 and values.is_contiguous(memory_format=torch.channels_last)
    if values.device.type != "cpu" or not by_rows:
        return values.sub_(mean).div_(std)
    # Channels last: whole rows of pixels at once, since a CPU is slow at three channels in the innermost loop.
    count, channels, height, width = values.shape
    rows = values.permute(0, 2, 3, 1).view(count, height, width * channels)
    rows.sub_(mean.flatten().repeat(width)).div_(std.flatten().repeat(width))
    return values


def evaluation_crop(image: Image, size: int) -> Image:
    """Return the central square of an image, as the networks are tested on it."""
    side = round(size * 256 / 224)
    width, height = image.size
    if side * side * max(width, height) > _MOST_PIXELS * min(width, height):
        raise DataError(f"its sides of {width} and {height} pixels are too different for a square crop")
    if width <= height:
        shape = side, int(side * height / width)
    else:
        shape = int(side * width / height), side
    if shape != image.size:
        image = image.resize(shape, 2)
    left, top = (round((length - size) / 2) for length in shape)
    return image.crop((left, top, left + size, top + size))


def image_tensor(image: Image) -> Tensor:
    """Return the values of an image, (C, H, W) in uint8. They stay in the order of Pillow, channels last."""
    pixels = torch.from_numpy(np.array(image))
    return pixels.permute(2, 0, 1) if pixels.ndim == 3 else pixels.unsqueeze(0)


def read_image(path: Path) -> bytes:
    """Return the content of an image file."""
    if not path.is_file():  # opening a fifo would block
        raise DataError("it is missing or not a regular file")
    with open(path, "rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise DataError(f"it has more than {MOST_BYTES:,} bytes")
    return content


def decode_image(content: bytes, mode: str = "RGB") -> Image:
    """Return an encoded image in a mode of Pillow, as stored: EXIF's orientation is not applied.

    As in torchvision's ImageFolder, except that of 16 bits the upper eight are taken, where Pillow would clip: an image
    of 16 bits would be white.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        image: Image.Image = Image.open(BytesIO(content), formats=_FORMATS)
    except UnidentifiedImageError:
        raise DataError(f"it is not an image that can be read ({', '.join(_FORMATS)})") from None
    if image.width * image.height > _MOST_PIXELS:
        raise DataError(f"it has {image.width} x {image.height} pixels, more than {_MOST_PIXELS:,}")
    image.load()
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise DataError(f"its pixels have 32 bits and no known range (mode {image.mode}); save it with 8 or 16 bits")
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # the same colours; Pillow warns otherwise
    return image if image.mode == mode else image.convert(mode)  # which copies also if there is nothing to do
