"""The order of the training images, and batches gathered and augmented on the device, or loaded by workers."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from softprune.errors import ConfigError
from softprune.lab.data.arrays import ArrayDataset, Augmentation, augmented_batch, image_words, normalised
from softprune.lab.data.files import BatchLoader
from softprune.lab.data.load import DataBundle
from softprune.rng import Clock, hashed_permutation

# Takes the place of a site's number; far above any of them, so that masks and order never share their noise.
_ORDER = 0x6F726465


@dataclass(frozen=True, kw_only=True)
class EpochSampler:
    """Batches of image indices, all of them full: an epoch has ceil(size / batch_size) steps.

    They are cut from an endless sequence of permutations. If an epoch ends inside a permutation, the next one continues
    there. In the long run every image is used equally often.

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
        length = self.steps * self.batch_size
        first, start = divmod(epoch * length, self.size)
        passes = range(first, first - (-(start + length) // self.size))
        order = torch.cat([self.permutation(number, device) for number in passes])[start : start + length]
        return order.view(self.steps, self.batch_size)[:, self.local_slice].contiguous()

    def permutation(self, number: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the permutation with this number: the images sorted by a hash."""
        return hashed_permutation(self.size, self.seed, _ORDER, number, device)


class ArrayBatches:
    """Batches gathered from images on the device. The order of the epoch is there too, so a step needs no host.

    :meth:`rows` returns two tensors that identify a batch, and :meth:`batch` turns them into images and labels. Both
    are tensor operations on buffers of fixed address, so that a CUDA graph can hold them.
    """

    def __init__(self, data: ArrayDataset, sampler: EpochSampler, augmentation: Augmentation) -> None:
        self.data, self.sampler, self.augmentation = data, sampler, augmentation
        channels, height, width = data.shape
        side = augmentation.resize
        self.device = data.device
        self.image_shape: tuple[int, ...] = (channels, side or height, side or width)
        self._order = torch.zeros(sampler.steps, sampler.local_batch, dtype=torch.int64, device=self.device)
        words = image_words(sampler.seed, sampler.batch_size, self.device)
        self._words = words[:, sampler.local_slice].contiguous()

    def begin(self, epoch: int, start: int) -> None:
        """Start an epoch at its batch number `start`."""
        self._order.copy_(self.sampler.indices(epoch, self.device))

    def before_step(self) -> None:
        """Make the next batch ready. Runs outside any graph."""

    def indices(self, position: int) -> list[int]:
        """Return the indices of a batch's images, for messages."""
        return self._order[position].tolist()

    def rows(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return what identifies the batch at `position`, a tensor of one number."""
        return self._order.index_select(0, position).squeeze(0), self._words

    def batch(self, first: Tensor, second: Tensor, clock: Clock) -> tuple[Tensor, Tensor]:
        """Return the normalised images and the labels of what :meth:`rows` returned."""
        return augmented_batch(self.data, first, self.augmentation, clock, second)


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


BatchSource = ArrayBatches | LoaderBatches


def make_batches(bundle: DataBundle, sampler: EpochSampler, *, device: torch.device, workers: int = 0) -> BatchSource:
    """Return the batches of the training images of `bundle`, which are on `device` if they are in memory."""
    if isinstance(bundle.train, ArrayDataset):
        return ArrayBatches(bundle.train, sampler, bundle.augmentation)
    return LoaderBatches(BatchLoader(bundle.train, workers=workers, device=device), sampler)
