"""Random crops, flips and erased rectangles of a batch, on the device and without a random generator.

The augmentation of an image is a hash of (seed, step, position in the batch), the same that drives the masks. It is
therefore the same after a resume, on any number of processes, eager, compiled and inside a CUDA graph.
"""

import torch
from torch import Tensor

from softprune.data.datasets import ArrayDataset, Augmentation
from softprune.data.mixing import DRAWS, erased_pixels
from softprune.rng import Clock, channel_words, uniform_noise

# Takes the place of a site's number; far above any of them, so that masks and images never share their noise.
_IMAGES = 0x696D6167


def image_words(seed: int, batch_size: int, device: torch.device | str | None = None) -> Tensor:
    """Return the constant part of the hash: a row each for rows, columns and flips, the others for erasing."""
    draws = 3 + DRAWS
    return channel_words(seed, _IMAGES, draws * batch_size, device).view(draws, batch_size)


def augmented_batch(
    data: ArrayDataset, indices: Tensor, augmentation: Augmentation, clock: Clock, words: Tensor
) -> tuple[Tensor, Tensor]:
    """Return normalised and augmented images, and labels.

    Args:
        data: The images.
        indices: The images of the batch, (B,).
        augmentation: What to do with them.
        clock: Its step (and forward) select the noise.
        words: The columns of :func:`image_words` that belong to these positions of the batch.
    """
    pad, flip = augmentation.pad, augmentation.flip
    if augmentation == Augmentation():
        return data.batch(indices)
    height, width = data.images.shape[-2:]
    u = uniform_noise(clock, words if augmentation.erasing else words[:3])
    shift = (u[:2] * (2 * pad + 1)).to(torch.int64) - pad
    row = torch.arange(height, device=indices.device) + shift[0, :, None]
    column = torch.arange(width, device=indices.device).expand(len(indices), width)
    if flip:
        column = torch.where(u[2, :, None] < 0.5, column, width - 1 - column)
    column = column + shift[1, :, None]
    # One gather by position in the plane: the fastest variant tried on a CPU, and a single kernel together with the
    # normalisation when compiled.
    inside = ((row >= 0) & (row < height))[:, :, None] & ((column >= 0) & (column < width))[:, None, :]
    place = row.clamp(0, height - 1)[:, :, None] * width + column.clamp(0, width - 1)[:, None, :]
    pixels = data.images.index_select(0, indices).flatten(2)
    pixels = pixels.gather(2, place.flatten(1)[:, None, :].expand_as(pixels)).unflatten(2, (height, width))
    if augmentation.erasing:
        inside = inside & ~erased_pixels(u[3:], augmentation.erasing, height, width)
    images = torch.where(inside[:, None], data.normalise(pixels), 0.0)
    return images, data.labels.index_select(0, indices)
