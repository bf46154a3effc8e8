"""Data sets in memory: one tensor on the training device, where batches are gathered, cropped and augmented.

`EpochSampler` defines the order of the images for all data sets. Every random number is a hash of (seed, step, position
in the batch), so a batch is the same in eager mode, compiled, inside a CUDA graph, after resuming, and for any number
of processes.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from softprune.errors import ConfigError, DataError
from softprune.rng import Clock, channel_words, hashed_permutation, uniform_noise

# Used in place of a site number in the hash, and far above all of them: masks, images and order never share noise.
_IMAGES, _ORDER = 0x696D6167, 0x6F726465
_ERASING_DRAWS = 5
_CROP_TRIES = 10
"""Number of attempts to draw a resized crop that lies within the image."""
# The usual ranges of resized crops and of random erasing: share of the image's area, and aspect ratio.
_CROP_AREA, _CROP_RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
_ERASED_AREA, _ERASED_RATIO = (0.02, 0.33), 3.3


def normalised(pixels: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return normalised pixel values, in float32."""
    # Allocates a single tensor: on a CPU, allocating memory takes most of the time.
    return pixels.to(torch.float32, copy=True).sub_(mean).div_(std)


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Random augmentation of training images in memory: crop, flip and random erasing."""

    pad: int = 0
    """Width of the padding with the mean colour, before a random crop of the original size."""
    resize: int = 0
    """Size in pixels of a RandomResizedCrop, as usual for ImageNet; 0 for none."""
    flip: bool = False
    """Flip images horizontally at random."""
    erasing: float = 0.0
    """Probability that a random rectangle of the image is set to the mean colour."""


@dataclass(frozen=True)
class ArrayDataset:
    """Images and labels as tensors on the training device.

    Images keep their stored dtype, uint8 for CIFAR, and are normalised when a batch is gathered. This takes a quarter
    of the memory and bandwidth of float32, and a compiled step fuses the arithmetic into the gather.
    """

    images: Tensor
    """(N, C, H, W), usually uint8."""
    labels: Tensor
    """(N,), int64."""
    mean: Tensor
    """(C, 1, 1), float32, in the units of `images`."""
    std: Tensor
    """(C, 1, 1), float32, in the units of `images`."""

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or self.labels.shape != self.images.shape[:1] or self.labels.dtype != torch.int64:
            raise DataError(
                "Images must be (N, C, H, W), with one int64 label each. Got shapes "
                f"{tuple(self.images.shape)} and {tuple(self.labels.shape)}, and labels of {self.labels.dtype}."
            )

    @classmethod
    def from_arrays(
        cls, images: Any, labels: Any, *, mean: Any = 0.0, std: Any = 1.0, device: torch.device | str = "cpu"
    ) -> Self:
        """Create a data set from images (N, C, H, W) or (N, H, W) and labels (N,), in any type torch.as_tensor accepts.

        `mean` and `std` are one value per channel, or a single value.
        """
        pixels, numbers = torch.as_tensor(images), torch.as_tensor(labels)
        pixels = pixels.unsqueeze(1) if pixels.ndim == 3 else pixels
        constants = [
            torch.as_tensor(values, dtype=torch.float32).expand(pixels.shape[1]).clone().to(device).view(-1, 1, 1)
            for values in (mean, std)
        ]
        if not bool((constants[1] > 0).all()):
            raise DataError(f"`std` must be positive. Got {std}; remove constant channels.")
        if not torch.equal(numbers, numbers.to(torch.int64)):
            raise DataError("Labels must be integer class indices. Got other numbers; number the classes from 0.")
        return cls(pixels.to(device).contiguous(), numbers.to(device, torch.int64), *constants)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def device(self) -> torch.device:
        return self.images.device

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, height and width of an image."""
        return tuple(self.images.shape[1:])

    def to(self, device: torch.device | str) -> Self:
        """Return the data set with its tensors on ``device``."""
        return replace(self, **{key: getattr(self, key).to(device) for key in ("images", "labels", "mean", "std")})

    def subset(self, indices: Tensor, *, augment: bool = True) -> Self:
        """Return the images with these indices. ``augment`` has no effect, since batches are augmented elsewhere."""
        chosen = indices.to(self.device)
        return replace(self, images=self.images[chosen], labels=self.labels[chosen])

    def normalise(self, pixels: Tensor) -> Tensor:
        """Return normalised images (..., C, H, W) in float32."""
        return normalised(pixels, self.mean, self.std)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalised images and the labels at ``indices``, without augmentation."""
        return self.normalise(self.images.index_select(0, indices)), self.labels.index_select(0, indices)


@dataclass(frozen=True)
class EpochSampler:
    """Full batches of image indices; an epoch has ceil(size / batch_size) steps.

    Batches are consecutive slices of an endless sequence of random permutations. An epoch may end inside a permutation,
    where the next one continues, so that all images are used equally often in the long run.

    Each process takes a slice of every batch, so the batches do not depend on the number of processes.
    """

    size: int
    """Number of images."""
    batch_size: int
    """Images per optimizer step, over all processes."""
    seed: int = 0
    """Seed of the permutations."""
    rank: int = 0
    """Rank of this process."""
    world_size: int = 1
    """Number of processes."""

    def __post_init__(self) -> None:
        if self.batch_size % self.world_size:
            raise ConfigError(
                f"The batch size must be divisible by the number of processes, {self.world_size}. "
                f"Got a batch size of {self.batch_size}; change the number of processes, or data.batch_size in a new "
                "run."
            )

    @property
    def steps(self) -> int:
        return -(-self.size // self.batch_size)

    @property
    def local_batch(self) -> int:
        """Images per step in this process."""
        return self.batch_size // self.world_size

    def share(self, batches: Tensor) -> Tensor:
        """Return this process's slice of batches (..., batch_size)."""
        first = self.rank * self.local_batch
        return batches[..., first : first + self.local_batch].contiguous()

    def draws(self, epoch: int) -> Tensor:
        """Return a running count of the images since training began, for an epoch, (steps, local_batch)."""
        length = self.steps * self.batch_size
        return self.share(torch.arange(epoch * length, (epoch + 1) * length).view(self.steps, self.batch_size))

    def indices(self, epoch: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the image indices of an epoch, (steps, local_batch), the same on every device."""
        length = self.steps * self.batch_size
        first, start = divmod(epoch * length, self.size)
        passes = range(first, first - (-(start + length) // self.size))
        order = torch.cat([self.permutation(number, device) for number in passes])[start : start + length]
        return self.share(order.view(self.steps, self.batch_size))

    def permutation(self, number: int, device: torch.device | str = "cpu") -> Tensor:
        """Return permutation ``number`` of the sequence: the image indices sorted by a hash."""
        return hashed_permutation(self.size, self.seed, _ORDER, number, device)


class ArrayBatches:
    """Batches gathered from images on the device. The image order is on the device too, so steps do not need the host.

    :meth:`batch` consists of tensor operations on buffers at fixed addresses, so a CUDA graph can capture it.
    """

    def __init__(self, data: ArrayDataset, sampler: EpochSampler, augmentation: Augmentation) -> None:
        self.data, self.sampler, self.augmentation = data, sampler, augmentation
        self.device = data.device
        self._order = torch.zeros(sampler.steps, sampler.local_batch, dtype=torch.int64, device=self.device)
        self._words = sampler.share(image_words(sampler.seed, sampler.batch_size, self.device))

    def begin(self, epoch: int, start: int) -> None:
        """Start an epoch at batch `start`."""
        self._order.copy_(self.sampler.indices(epoch, self.device))

    def before_step(self) -> None:
        """Prepare the next batch. Called outside the CUDA graph."""

    def batch(self, position: Tensor, clock: Clock) -> tuple[Tensor, Tensor]:
        """Return normalised, augmented images and labels of the batch at `position`, a tensor (1,)."""
        indices = self._order.index_select(0, position).squeeze(0)
        return augmented_batch(self.data, indices, self.augmentation, clock, self._words)


def image_words(seed: int, batch_size: int, device: torch.device | str | None = None) -> Tensor:
    """Return the constant part of the hash (draws, batch_size); draws: rows, columns, flips, erasing, resized crops."""
    draws = 3 + _ERASING_DRAWS + 2 * _CROP_TRIES
    return channel_words(seed, _IMAGES, draws * batch_size, device).view(draws, batch_size)


def augmented_batch(
    data: ArrayDataset, indices: Tensor, augmentation: Augmentation, clock: Clock, words: Tensor
) -> tuple[Tensor, Tensor]:
    """Return normalised and augmented images and labels at ``indices``.

    `words` are the columns of :func:`image_words` for these positions of the batch.
    """
    if augmentation == Augmentation():
        return data.batch(indices)
    place, erasing, shape = words.split([3, _ERASING_DRAWS, 2 * _CROP_TRIES])
    u = uniform_noise(clock, place)
    flipped = u[2] >= 0.5 if augmentation.flip else None
    pixels = data.images.index_select(0, indices)
    inside: Tensor | None = None
    if augmentation.resize:
        boxes = random_boxes(pixels.shape[-2:], u[:2], uniform_noise(clock, shape))
        pixels = resized_crops(pixels, boxes, augmentation.resize, flipped)
    else:
        pixels, inside = _shifted(pixels, u[:2], augmentation.pad, flipped)
    images = data.normalise(pixels)
    if augmentation.erasing:
        kept = ~erased_pixels(uniform_noise(clock, erasing), augmentation.erasing, *pixels.shape[-2:])
        inside = kept if inside is None else inside & kept
    images = images if inside is None else torch.where(inside[:, None], images, 0.0)
    return images, data.labels.index_select(0, indices)


def _shifted(pixels: Tensor, u: Tensor, pad: int, flipped: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return random crops of the padded images, and a mask (B, H, W) that is False for padding."""
    height, width = pixels.shape[-2:]
    shift = (u * (2 * pad + 1)).to(torch.int64) - pad
    row = torch.arange(height, device=pixels.device) + shift[0, :, None]
    column = torch.arange(width, device=pixels.device).expand(len(pixels), width)
    if flipped is not None:
        column = torch.where(flipped[:, None], width - 1 - column, column)
    column = column + shift[1, :, None]
    # One gather over flattened positions: the fastest variant measured on a CPU, and when compiled, a single kernel
    # together with the normalisation.
    inside = ((row >= 0) & (row < height))[:, :, None] & ((column >= 0) & (column < width))[:, None, :]
    place = row.clamp(0, height - 1)[:, :, None] * width + column.clamp(0, width - 1)[:, None, :]
    flat = pixels.flatten(2)
    return flat.gather(2, place.flatten(1)[:, None, :].expand_as(flat)).unflatten(2, (height, width)), inside


def random_boxes(size: torch.Size, place: Tensor, shape: Tensor) -> Tensor:
    """Return top, left, height and width (4, B) of crops drawn like RandomResizedCrop, from uniform random numbers.

    ``place`` (2, B) determines top and left; ``shape`` (2 * tries, B) determines areas and aspect ratios.
    """
    height, width = size
    area, ratio = shape.unflatten(0, (2, _CROP_TRIES))
    area = (_CROP_AREA[0] + (_CROP_AREA[1] - _CROP_AREA[0]) * area) * (height * width)
    low, high = (math.log(value) for value in _CROP_RATIO)
    ratio = torch.exp(low + (high - low) * ratio)
    h, w = (area / ratio).sqrt().round(), (area * ratio).sqrt().round()
    fits = (h > 0) & (h <= height) & (w > 0) & (w <= width)
    first, found = fits.to(torch.uint8).argmax(0, keepdim=True), fits.any(0)
    # If no try fits, take the largest centre crop with an aspect ratio in the range.
    centre = min(height, round(width / _CROP_RATIO[0])), min(width, round(height * _CROP_RATIO[1]))
    h, w = (torch.where(found, tries.gather(0, first)[0], side) for tries, side in zip((h, w), centre, strict=True))
    top = torch.where(found, place[0] * (height - h + 1), (height - h) / 2).floor()
    left = torch.where(found, place[1] * (width - w + 1), (width - w) / 2).floor()
    return torch.stack([top, left, h, w])


def resized_crops(pixels: Tensor, boxes: Tensor, size: int, flipped: Tensor | None = None) -> Tensor:
    """Crop images (B, C, H, W) to the boxes and resize them to ``size`` x ``size`` as Pillow does, in float32.

    Pillow's bilinear filter is a product with one matrix per side. It averages (antialiases) when a crop shrinks.
    """
    top, left, h, w = boxes
    rows = _resize_matrices(top, h, pixels.shape[-2], size)
    columns = _resize_matrices(left, w, pixels.shape[-1], size)
    if flipped is not None:
        columns = torch.where(flipped[:, None, None], columns.flip(1), columns)
    return rows[:, None] @ pixels.to(torch.float32) @ columns.mT[:, None]


def _resize_matrices(start: Tensor, length: Tensor, side: int, size: int) -> Tensor:
    """Return weights (B, size, side) that resize the ``length`` pixels from ``start`` on to ``size`` pixels."""
    scale = length[:, None, None] / size
    centre = (torch.arange(size, device=start.device)[:, None] + 0.5) * scale
    place = torch.arange(side, device=start.device) - start[:, None, None]
    weights = (1 - (place + 0.5 - centre).abs() / scale.clamp(min=1)).clamp(min=0)
    weights = torch.where((place >= 0) & (place < length[:, None, None]), weights, 0.0)
    return weights / weights.sum(-1, keepdim=True)


def erased_pixels(u: Tensor, probability: float, height: int, width: int) -> Tensor:
    """Return a mask (B, height, width) of pixels to erase (Zhong et al., 2020), from uniform numbers `u` (draws, B)."""
    chosen, area, ratio, top, left = u[..., None, None]
    least, most = _ERASED_AREA
    area = (least + (most - least) * area) * (height * width)
    ratio = torch.exp((2 * ratio - 1) * math.log(_ERASED_RATIO))
    rows = (area * ratio).sqrt().round().clamp(1, height)
    columns = (area / ratio).sqrt().round().clamp(1, width)
    top, left = (top * (height - rows + 1)).floor(), (left * (width - columns + 1)).floor()
    row = torch.arange(height, device=u.device)[:, None]
    column = torch.arange(width, device=u.device)
    inside = (row >= top) & (row < top + rows) & (column >= left) & (column < left + columns)
    return inside & (chosen < probability)
