"""Where a training step gets its batch from: images on the device, or images that workers load."""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from softprune.data import ArrayDataset, Augmentation, DataBundle, FolderLoader
from softprune.data.augment import augmented_batch, image_words
from softprune.data.folder import MEAN, STD
from softprune.data.sampler import EpochSampler
from softprune.errors import ConfigError
from softprune.rng import Clock


class BatchSource(Protocol):
    """Hands out an epoch's batches, each in equal pieces (one, unless gradients are accumulated).

    A piece is two tensors that say which images; :meth:`batch` makes images and labels of them. `pieces` and
    `batch` are tensor operations on buffers that stay in place, so that a CUDA graph can hold them.
    """

    sampler: EpochSampler
    device: torch.device

    def begin(self, epoch: int, start: int) -> None:
        """The epoch's batches come next, from number `start` on."""

    def before_step(self) -> None:
        """Make the next batch ready, outside any graph."""

    def pieces(self, position: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The pieces of the batch at `position`, a tensor of one number."""

    def batch(self, first: Tensor, second: Tensor, clock: Clock) -> tuple[Tensor, Tensor]:
        """Normalised images and labels of a piece."""

    def indices(self, position: int) -> list[int]:
        """The images of a batch of this epoch, for messages."""


def make_batches(
    bundle: DataBundle, sampler: EpochSampler, *, device: torch.device, pieces: int = 1, workers: int = 0
) -> BatchSource:
    """The feed for the training images of `bundle`, which are on `device` if they are in memory."""
    if sampler.local_batch % pieces:
        raise ConfigError(
            f"A process's share of the batch, {sampler.local_batch} images, must divide into equal pieces. "
            f"Got {pieces} pieces."
        )
    if isinstance(bundle.train, ArrayDataset):
        return ArrayBatches(bundle.train, sampler, bundle.augmentation, pieces=pieces)
    loader = FolderLoader(bundle.train, workers=workers, device=device)
    return LoaderBatches(loader, sampler, bundle.input_shape, pieces=pieces)


class ArrayBatches:
    """Batches gathered from images on the device; the epoch's order is there too, so a step needs no host."""

    def __init__(
        self, data: ArrayDataset, sampler: EpochSampler, augmentation: Augmentation, *, pieces: int = 1
    ) -> None:
        self.data, self.sampler, self.augmentation = data, sampler, augmentation
        self.device = data.device
        self._pieces = pieces
        self._order = torch.zeros(sampler.steps, sampler.local_batch, dtype=torch.int64, device=self.device)
        words = image_words(sampler.seed, sampler.batch_size, self.device)[:, sampler.local_slice]
        self._words = [piece.contiguous() for piece in words.chunk(pieces, dim=1)]

    def begin(self, epoch: int, start: int) -> None:
        self._order.copy_(self.sampler.indices(epoch, self.device))

    def before_step(self) -> None:
        pass

    def pieces(self, position: Tensor) -> list[tuple[Tensor, Tensor]]:
        row = self._order.index_select(0, position).squeeze(0)
        return list(zip(row.chunk(self._pieces), self._words, strict=True))

    def batch(self, first: Tensor, second: Tensor, clock: Clock) -> tuple[Tensor, Tensor]:
        return augmented_batch(self.data, first, self.augmentation, clock, second)

    def indices(self, position: int) -> list[int]:
        return self._order[position].tolist()


class LoaderBatches:
    """Batches from workers, copied into buffers of fixed place. They come as bytes, a quarter of the traffic,
    and are normalised on the device."""

    def __init__(
        self,
        loader: FolderLoader,
        sampler: EpochSampler,
        input_shape: tuple[int, int, int],
        *,
        pieces: int = 1,
    ) -> None:
        self.loader, self.sampler, self.device = loader, sampler, loader.device
        count = sampler.local_batch
        images = torch.zeros(count, *input_shape, dtype=torch.uint8, device=self.device)
        labels = torch.zeros(count, dtype=torch.int64, device=self.device)
        self._buffers = images, labels
        self._pieces = list(zip(images.chunk(pieces), labels.chunk(pieces), strict=True))
        self._mean, self._std = (
            torch.tensor(values, device=self.device).view(3, 1, 1) for values in (MEAN, STD)
        )
        self._order = torch.empty(0, 0, dtype=torch.int64)
        self._coming: Iterator[tuple[Tensor, Tensor]] = iter(())

    def begin(self, epoch: int, start: int) -> None:
        self._order = self.sampler.indices(epoch)
        self._coming = self.loader.batches(self._order[start:], self.sampler.draws(epoch)[start:])

    def before_step(self) -> None:
        for buffer, content in zip(self._buffers, next(self._coming), strict=True):
            buffer.copy_(content)

    def pieces(self, position: Tensor) -> list[tuple[Tensor, Tensor]]:
        return self._pieces

    def batch(self, first: Tensor, second: Tensor, clock: Clock) -> tuple[Tensor, Tensor]:
        return (first.to(torch.float32) - self._mean) / self._std, second

    def indices(self, position: int) -> list[int]:
        return self._order[position].tolist()
