"""Random erasing, and mixup and CutMix, which mix each image of a batch with its neighbour.

They take their random numbers as arguments. A mix is one draw per step from (seed, step), made on the host for a whole
epoch at once. Inside the step only tensors are read, so it is the same eager, compiled, inside a CUDA graph, after a
resume and on any number of processes.
"""

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

# The usual ranges: share of the image's area, and ratio of the rectangle's sides.
_AREA = (0.02, 0.33)
_RATIO = 3.3
DRAWS = 5
"""Uniform numbers that each image takes."""


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """How the images of a batch are mixed. With both, each batch takes one of the two at random."""

    mixup: float = 0.0
    """Parameter alpha of mixup's Beta distribution; 0 for no mixup."""
    cutmix: float = 0.0
    """Parameter alpha of CutMix's Beta distribution; 0 for no CutMix."""

    def __bool__(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0

    def draws(self, seed: int, steps: Iterable[int], shape: tuple[int, int]) -> Tensor:
        """Return the draws of these steps for images of this height and width, (steps, 6) in float32.

        A row holds the share of the image outside a box, the box (top, bottom, left, right), and the label's share.
        """
        return torch.tensor([self._draw(random.Random((seed << 64) + step), shape) for step in steps])

    def _draw(self, chance: random.Random, shape: tuple[int, int]) -> list[float]:
        cut = self.cutmix > 0 and (self.mixup == 0 or chance.random() < 0.5)
        alpha = self.cutmix if cut else self.mixup
        share = chance.betavariate(alpha, alpha)
        if not cut:
            return [share, 0, 0, 0, 0, share]
        height, width = shape
        side = (1 - share) ** 0.5 / 2
        row, column = chance.randrange(height), chance.randrange(width)
        top, bottom = max(0, int(row - side * height)), min(height, int(row + side * height))
        left, right = max(0, int(column - side * width)), min(width, int(column + side * width))
        kept = 1 - (bottom - top) * (right - left) / (height * width)
        return [1, top, bottom, left, right, kept]


def mixed(images: Tensor, draw: Tensor) -> Tensor:
    """Return each image mixed with the one before it in the batch; the labels mix as ``draw[5]`` says."""
    share, top, bottom, left, right, _ = draw.unbind()
    row = torch.arange(images.shape[-2], device=images.device)[:, None]
    column = torch.arange(images.shape[-1], device=images.device)
    inside = (row >= top) & (row < bottom) & (column >= left) & (column < right)
    weight = torch.where(inside, 0.0, share)
    return weight * images + (1 - weight) * images.roll(1, 0)


def erased_pixels(u: Tensor, probability: float, height: int, width: int) -> Tensor:
    """Return which pixels random erasing (Zhong et al., 2020) removes, (B, height, width), from (DRAWS, B) numbers."""
    chosen, area, ratio, top, left = u[..., None, None]
    least, most = _AREA
    area = (least + (most - least) * area) * (height * width)
    ratio = torch.exp((2 * ratio - 1) * math.log(_RATIO))
    rows = (area * ratio).sqrt().round().clamp(1, height)
    columns = (area / ratio).sqrt().round().clamp(1, width)
    top, left = (top * (height - rows + 1)).floor(), (left * (width - columns + 1)).floor()
    row = torch.arange(height, device=u.device)[:, None]
    column = torch.arange(width, device=u.device)
    inside = (row >= top) & (row < top + rows) & (column >= left) & (column < left + columns)
    return inside & (chosen < probability)
