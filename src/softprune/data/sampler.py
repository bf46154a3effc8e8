"""The order of the training images: a pure function of (seed, epoch)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from softprune.errors import ConfigError
from softprune.rng import hashed_permutation

# Takes the place of a site's number; far above any of them, so that masks and order never share their noise.
_ORDER = 0x6F726465


@dataclass(frozen=True, kw_only=True)
class EpochSampler:
    """Batches of image indices, all of them full.

    They are cut from an endless sequence of permutations, like the authors' queue: an epoch has
    ceil(size / batch_size) steps, and if it ends inside a permutation, the next epoch continues there. In the long run
    every image is used equally often.

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
        if self.size < 1 or self.batch_size < 1:
            raise ConfigError(
                "A sampler needs at least one image, and batches of at least one image. "
                f"Got {self.size} images and batches of {self.batch_size}."
            )
        if self.batch_size % self.world_size:
            raise ConfigError(
                f"The batch must divide evenly among the {self.world_size} processes. "
                f"Got a batch size of {self.batch_size}."
            )
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank must lie in 0 to {self.world_size - 1}. Got {self.rank}.")

    @property
    def steps(self) -> int:
        """Steps in an epoch."""
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
