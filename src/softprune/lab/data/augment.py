"""Augmentation of images: random crops, for one image and for a batch on the device, erasing, mixup and CutMix.

Erasing, mixup and CutMix take their random numbers as arguments. A mix is one draw per step from (seed, step), made on
the host for a whole epoch at once. Inside the step only tensors are read, so it is the same eager, compiled, inside a
CUDA graph, after a resume and on any number of processes.
"""

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

# The usual ranges: the crop's share of the image's area, and the ratio of its sides.
_CROP_AREA = (0.08, 1.0)
_CROP_RATIO = (3 / 4, 4 / 3)
_LOG_CROP_RATIO = (math.log(_CROP_RATIO[0]), math.log(_CROP_RATIO[1]))
CROP_TRIES = 10
"""A crop that does not lie within the image is drawn again, at most this often."""


def random_box(height: int, width: int, chance: random.Random) -> tuple[int, int, int, int]:
    """Return top, left, height and width of a random crop, with ImageNet's usual area and ratio, or of the centre."""
    for _ in range(CROP_TRIES):
        area = height * width * chance.uniform(*_CROP_AREA)
        ratio = math.exp(chance.uniform(*_LOG_CROP_RATIO))
        w, h = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 0 < w <= width and 0 < h <= height:
            return chance.randint(0, height - h), chance.randint(0, width - w), h, w
    h, w = _centre(height, width)
    return (height - h) // 2, (width - w) // 2, h, w


def random_boxes(height: int, width: int, place: Tensor, shape: Tensor) -> Tensor:
    """Return (4, B) top, left, height and width like :func:`random_box`, from uniform numbers.

    ``place`` is (2, B), for top and left; ``shape`` is (2 * CROP_TRIES, B), for areas and ratios.
    """
    area, ratio = shape.unflatten(0, (2, CROP_TRIES))
    area = (_CROP_AREA[0] + (_CROP_AREA[1] - _CROP_AREA[0]) * area) * (height * width)
    ratio = torch.exp(_LOG_CROP_RATIO[0] + (_LOG_CROP_RATIO[1] - _LOG_CROP_RATIO[0]) * ratio)
    h, w = (area / ratio).sqrt().round(), (area * ratio).sqrt().round()
    fits = (h > 0) & (h <= height) & (w > 0) & (w <= width)
    first = fits.to(torch.uint8).argmax(0, keepdim=True)
    found = fits.any(0)
    h, w = (
        torch.where(found, tries.gather(0, first)[0], side)
        for tries, side in zip((h, w), _centre(height, width), strict=True)
    )
    top = torch.where(found, place[0] * (height - h + 1), (height - h) / 2).floor()
    left = torch.where(found, place[1] * (width - w + 1), (width - w) / 2).floor()
    return torch.stack([top, left, h, w])


def resized_crops(pixels: Tensor, boxes: Tensor, size: int, flipped: Tensor | None = None) -> Tensor:
    """Return the boxes of images (B, C, H, W), resized to squares of ``size`` as Pillow does, in float32.

    Pillow's bilinear filter is a product of two matrices, one for each side. It averages where a crop shrinks.
    """
    top, left, h, w = boxes
    rows = _resize_matrices(top, h, pixels.shape[-2], size)
    columns = _resize_matrices(left, w, pixels.shape[-1], size)
    if flipped is not None:
        columns = torch.where(flipped[:, None, None], columns.flip(1), columns)
    return rows[:, None] @ pixels.to(torch.float32) @ columns.mT[:, None]


def _resize_matrices(start: Tensor, length: Tensor, side: int, size: int) -> Tensor:
    """Return (B, size, side) weights that resize ``length`` pixels from ``start`` on."""
    scale = length[:, None, None] / size
    centre = (torch.arange(size, device=start.device)[:, None] + 0.5) * scale
    place = torch.arange(side, device=start.device) - start[:, None, None]
    weights = (1 - (place + 0.5 - centre).abs() / scale.clamp(min=1)).clamp(min=0)
    weights = torch.where((place >= 0) & (place < length[:, None, None]), weights, 0.0)
    return weights / weights.sum(-1, keepdim=True)


def _centre(height: int, width: int) -> tuple[int, int]:
    """Return height and width of the largest crop of the centre with a ratio that is allowed."""
    return min(height, round(width / _CROP_RATIO[0])), min(width, round(height * _CROP_RATIO[1]))


# The usual ranges: share of the image's area, and ratio of the rectangle's sides.
_ERASED_AREA = (0.02, 0.33)
_ERASED_RATIO = 3.3
ERASING_DRAWS = 5
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
    """Return which pixels random erasing (Zhong et al., 2020) removes, (B, height, width). `u` is (draws, B)."""
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
