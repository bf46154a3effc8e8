"""The order of the training images, and batches gathered and augmented on the device, or loaded by workers."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from softprune.errors import ConfigError
from softprune.lab.data import augment
from softprune.lab.data.datasets import ArrayDataset, Augmentation, DataBundle
from softprune.lab.data.images import normalised
from softprune.lab.data.loader import BatchLoader
from softprune.rng import Clock, channel_words, hashed_permutation, hashed_uniform, uniform_noise

# Takes the place of a site's number; far above any of them, so that masks and images never share their noise.
_IMAGES = 0x696D6167


def image_words(seed: int, batch_size: int, device: torch.device | str | None = None) -> Tensor:
    """Return the constant part of the hash, a row for each draw: rows, columns, flips, erasing, resized crops."""
    draws = 3 + augment.ERASING_DRAWS + 2 * augment.CROP_TRIES
    return channel_words(seed, _IMAGES, draws * batch_size, device).view(draws, batch_size)


def augmented_batch(
    data: ArrayDataset, indices: Tensor, augmentation: Augmentation, clock: Clock, words: Tensor
) -> tuple[Tensor, Tensor]:
    """Return normalised and augmented images, and labels, of the images with these indices.

    The augmentation of an image is a hash of (seed, step, position in the batch), the same that drives the masks. It
    is therefore the same after a resume, on any number of processes, eager, compiled and inside a CUDA graph. `words`
    are the columns of :func:`image_words` that belong to these positions of the batch.
    """
    if augmentation == Augmentation():
        return data.batch(indices)
    place, erasing, shape = words.split([3, augment.ERASING_DRAWS, 2 * augment.CROP_TRIES])
    u = uniform_noise(clock, place)
    flipped = u[2] >= 0.5 if augmentation.flip else None
    pixels = data.images.index_select(0, indices)
    inside: Tensor | None = None
    if augmentation.resize:
        height, width = pixels.shape[-2:]
        boxes = augment.random_boxes(height, width, u[:2], uniform_noise(clock, shape))
        pixels = augment.resized_crops(pixels, boxes, augmentation.resize, flipped)
    else:
        pixels, inside = _shifted(pixels, u[:2], augmentation.pad, flipped)
    images = data.normalise(pixels)
    if augmentation.erasing:
        kept = ~augment.erased_pixels(uniform_noise(clock, erasing), augmentation.erasing, *pixels.shape[-2:])
        inside = kept if inside is None else inside & kept
    images = images if inside is None else torch.where(inside[:, None], images, 0.0)
    return images, data.labels.index_select(0, indices)


def _shifted(pixels: Tensor, u: Tensor, pad: int, flipped: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return crops of the padded images, and which of their pixels (B, H, W) are not padding."""
    height, width = pixels.shape[-2:]
    shift = (u * (2 * pad + 1)).to(torch.int64) - pad
    row = torch.arange(height, device=pixels.device) + shift[0, :, None]
    column = torch.arange(width, device=pixels.device).expand(len(pixels), width)
    if flipped is not None:
        column = torch.where(flipped[:, None], width - 1 - column, column)
    column = column + shift[1, :, None]
    # One gather by position in the plane: the fastest variant tried on a CPU, and a single kernel together with the
    # normalisation when compiled.
    inside = ((row >= 0) & (row < height))[:, :, None] & ((column >= 0) & (column < width))[:, None, :]
    place = row.clamp(0, height - 1)[:, :, None] * width + column.clamp(0, width - 1)[:, None, :]
    flat = pixels.flatten(2)
    return flat.gather(2, place.flatten(1)[:, None, :].expand_as(flat)).unflatten(2, (height, width)), inside


# Takes the place of a site's number; far above any of them, so that masks and order never share their noise.
_ORDER = 0x6F726465
_QUEUE = 0x71756575


@dataclass(frozen=True, kw_only=True)
class EpochSampler:
    """Batches of image indices, all of them full: an epoch has ceil(size / batch_size) steps.

    They are cut from an endless sequence: of permutations, or of draws from a queue. If an epoch ends inside a
    permutation, the next one continues there. In the long run every image is used equally often.

    With several processes each takes its slice of every batch, so that together they process the same batches as one.
    """

    size: int
    """Number of images."""
    batch_size: int
    """Images per optimizer step, over all processes."""
    seed: int = 0
    """Together with the epoch, determines the order."""
    rank: int = 0
    """Rank of this process."""
    world_size: int = 1
    """Number of processes."""
    queue: bool = False
    """Draw from a queue instead of permutations."""

    def __post_init__(self) -> None:
        if self.batch_size % self.world_size:
            raise ConfigError(
                f"The batch must divide evenly among the {self.world_size} processes. "
                f"Got a batch size of {self.batch_size}; start as many processes as divide it, or change a new run's "
                "data.batch_size."
            )

    @property
    def steps(self) -> int:
        return -(-self.size // self.batch_size)

    @property
    def local_batch(self) -> int:
        """Images per step in this process."""
        return self.batch_size // self.world_size

    @property
    def local_slice(self) -> slice:
        """The part of a batch that this process takes."""
        return slice(self.rank * self.local_batch, (self.rank + 1) * self.local_batch)

    def draws(self, epoch: int) -> Tensor:
        """Return the number of each image of the epoch, counted since training began, (steps, local_batch)."""
        length = self.steps * self.batch_size
        numbers = torch.arange(epoch * length, (epoch + 1) * length)
        return numbers.view(self.steps, self.batch_size)[:, self.local_slice].contiguous()

    def indices(self, epoch: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the images of the epoch's batches, (steps, local_batch), the same on every device."""
        order = self._from_queue(epoch, device) if self.queue else self._from_permutations(epoch, device)
        return order.view(self.steps, self.batch_size)[:, self.local_slice].contiguous()

    def _from_permutations(self, epoch: int, device: torch.device | str) -> Tensor:
        length = self.steps * self.batch_size
        first, start = divmod(epoch * length, self.size)
        passes = range(first, first - (-(start + length) // self.size))
        return torch.cat([self.permutation(number, device) for number in passes])[start : start + length]

    def _from_queue(self, epoch: int, device: torch.device | str) -> Tensor:
        """Draw random places of a buffer that holds all images at first; draw t refills its place with image t % size.

        A place therefore holds the image of the last draw that took this place.
        """
        length = self.steps * self.batch_size
        places = self._places(epoch, device)
        last = torch.full((self.size,), -1, device=device)
        for before in reversed(range(epoch)):
            if (last >= 0).all():
                break
            numbers = torch.arange(before * length, (before + 1) * length, device=device)
            # `last` holds later draws, which stay.
            last = last.scatter_reduce(0, self._places(before, device), numbers, "amax")
        order = places.argsort(stable=True)
        repeated = places[order].diff() == 0
        taken = last[places]
        taken[order[1:][repeated]] = epoch * length + order[:-1][repeated]
        return torch.where(taken < 0, places, taken % self.size)

    def _places(self, epoch: int, device: torch.device | str) -> Tensor:
        uniform = hashed_uniform(self.steps * self.batch_size, self.seed, _QUEUE, epoch, device)
        return (uniform * self.size).to(torch.int64).clamp_(max=self.size - 1)

    def permutation(self, number: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the permutation with this number: the images sorted by a hash."""
        return hashed_permutation(self.size, self.seed, _ORDER, number, device)


class BatchSource:
    """The batches of an epoch, each in equal micro-batches (one, unless gradients are accumulated).

    A micro-batch is two tensors that identify its images; :meth:`batch` turns them into images and labels.
    `micro_batches` and `batch` are tensor operations on buffers of fixed address, so that a CUDA graph can hold them.
    """

    sampler: EpochSampler
    device: torch.device
    image_shape: tuple[int, ...]
    """(channels, height, width)."""
    _order: Tensor
    """The images of the epoch's batches, (steps, local_batch)."""

    def begin(self, epoch: int, start: int) -> None:
        """Start an epoch at its batch number `start`."""
        raise NotImplementedError

    def before_step(self) -> None:
        """Make the next batch ready. Runs outside any graph."""

    def micro_batches(self, position: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the micro-batches of the batch at `position`, a tensor of one number."""
        raise NotImplementedError

    def batch(self, first: Tensor, second: Tensor, clock: Clock) -> tuple[Tensor, Tensor]:
        """Return the normalised images and the labels of a micro-batch."""
        raise NotImplementedError

    def indices(self, position: int) -> list[int]:
        """Return the indices of a batch's images, for messages."""
        return self._order[position].tolist()


def make_batches(
    bundle: DataBundle, sampler: EpochSampler, *, device: torch.device, accumulate: int = 1, workers: int = 0
) -> BatchSource:
    """Return the batches of the training images of `bundle`, which are on `device` if they are in memory.

    Each batch consists of `accumulate` micro-batches.
    """
    if sampler.local_batch % accumulate:
        raise ConfigError(
            f"The batch of a process, {sampler.local_batch} images, must divide into equal micro-batches. "
            f"Got {accumulate} of them; set train.accumulate to a divisor."
        )
    if isinstance(bundle.train, ArrayDataset):
        return ArrayBatches(bundle.train, sampler, bundle.augmentation, accumulate=accumulate)
    loader = BatchLoader(bundle.train, workers=workers, device=device)
    return LoaderBatches(loader, sampler, bundle.input_shape, accumulate=accumulate)


class ArrayBatches(BatchSource):
    """Batches gathered from images on the device. The order of the epoch is there too, so a step needs no host."""

    def __init__(
        self, data: ArrayDataset, sampler: EpochSampler, augmentation: Augmentation, *, accumulate: int = 1
    ) -> None:
        self.data, self.sampler, self.augmentation = data, sampler, augmentation
        channels, height, width = data.images.shape[1:]
        side = augmentation.resize
        self.device, self.image_shape = data.device, (channels, side or height, side or width)
        self._accumulate = accumulate
        self._order = torch.zeros(sampler.steps, sampler.local_batch, dtype=torch.int64, device=self.device)
        words = image_words(sampler.seed, sampler.batch_size, self.device)[:, sampler.local_slice]
        self._words = [part.contiguous() for part in words.chunk(accumulate, dim=1)]

    def begin(self, epoch: int, start: int) -> None:
        self._order.copy_(self.sampler.indices(epoch, self.device))

    def micro_batches(self, position: Tensor) -> list[tuple[Tensor, Tensor]]:
        row = self._order.index_select(0, position).squeeze(0)
        return list(zip(row.chunk(self._accumulate), self._words, strict=True))

    def batch(self, first: Tensor, second: Tensor, clock: Clock) -> tuple[Tensor, Tensor]:
        return augmented_batch(self.data, first, self.augmentation, clock, second)


class LoaderBatches(BatchSource):
    """Batches from worker processes, copied into buffers of fixed address.

    They arrive as loaded, usually bytes, a quarter of the traffic of floats, and are normalised on the device.
    """

    def __init__(
        self, loader: BatchLoader, sampler: EpochSampler, input_shape: tuple[int, int, int], *, accumulate: int = 1
    ) -> None:
        self.loader, self.sampler, self.device = loader, sampler, loader.device
        self.image_shape: tuple[int, ...] = input_shape
        count = sampler.local_batch
        images = torch.zeros(count, *input_shape, dtype=loader.dataset.dtype, device=self.device)
        labels = torch.zeros(count, dtype=torch.int64, device=self.device)
        self._buffers = images, labels
        self._micro_batches = list(zip(images.chunk(accumulate), labels.chunk(accumulate), strict=True))
        self._mean, self._std = loader.dataset.constants(self.device)
        self._order = torch.empty(0, 0, dtype=torch.int64)
        self._coming: Iterator[tuple[Tensor, Tensor]] = iter(())

    def begin(self, epoch: int, start: int) -> None:
        self._order = self.sampler.indices(epoch)
        self._coming = self.loader.batches(self._order[start:], self.sampler.draws(epoch)[start:])

    def before_step(self) -> None:
        for buffer, content in zip(self._buffers, next(self._coming), strict=True):
            buffer.copy_(content)

    def micro_batches(self, position: Tensor) -> list[tuple[Tensor, Tensor]]:
        return self._micro_batches

    def batch(self, first: Tensor, second: Tensor, clock: Clock) -> tuple[Tensor, Tensor]:
        return normalised(first, self._mean, self._std), second
