"""The batches of a training step: gathered from images on the device, or loaded by worker processes."""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from softprune.data.augment import augmented_batch, image_words
from softprune.data.datasets import ArrayDataset, Augmentation, DataBundle
from softprune.data.images import normalised
from softprune.data.loader import BatchLoader
from softprune.data.sampler import EpochSampler
from softprune.errors import ConfigError
from softprune.rng import Clock


class BatchSource(Protocol):
    """The batches of an epoch, each in equal micro-batches (one, unless gradients are accumulated).

    A micro-batch is two tensors that identify its images; :meth:`batch` turns them into images and labels.
    `micro_batches` and `batch` are tensor operations on buffers of fixed address, so that a CUDA graph can hold them.
    """

    sampler: EpochSampler
    device: torch.device
    image_shape: tuple[int, ...]
    """(channels, height, width)."""

    def begin(self, epoch: int, start: int) -> None:
        """Start an epoch at its batch number `start`."""

    def before_step(self) -> None:
        """Make the next batch ready. Runs outside any graph."""

    def micro_batches(self, position: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the micro-batches of the batch at `position`, a tensor of one number."""

    def batch(self, first: Tensor, second: Tensor, clock: Clock) -> tuple[Tensor, Tensor]:
        """Return the normalised images and the labels of a micro-batch."""

    def indices(self, position: int) -> list[int]:
        """Return the indices of a batch's images, for messages."""


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


class ArrayBatches:
    """Batches gathered from images on the device. The order of the epoch is there too, so a step needs no host."""

    def __init__(
        self, data: ArrayDataset, sampler: EpochSampler, augmentation: Augmentation, *, accumulate: int = 1
    ) -> None:
        self.data, self.sampler, self.augmentation = data, sampler, augmentation
        self.device, self.image_shape = data.device, tuple(data.images.shape[1:])
        self._accumulate = accumulate
        self._order = torch.zeros(sampler.steps, sampler.local_batch, dtype=torch.int64, device=self.device)
        words = image_words(sampler.seed, sampler.batch_size, self.device)[:, sampler.local_slice]
        self._words = [part.contiguous() for part in words.chunk(accumulate, dim=1)]

    def begin(self, epoch: int, start: int) -> None:
        self._order.copy_(self.sampler.indices(epoch, self.device))

    def before_step(self) -> None:
        pass

    def micro_batches(self, position: Tensor) -> list[tuple[Tensor, Tensor]]:
        row = self._order.index_select(0, position).squeeze(0)
        return list(zip(row.chunk(self._accumulate), self._words, strict=True))

    def batch(self, first: Tensor, second: Tensor, clock: Clock) -> tuple[Tensor, Tensor]:
        return augmented_batch(self.data, first, self.augmentation, clock, second)

    def indices(self, position: int) -> list[int]:
        return self._order[position].tolist()


class LoaderBatches:
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

    def indices(self, position: int) -> list[int]:
        return self._order[position].tolist()
