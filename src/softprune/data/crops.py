"""Random crops that are resized to a square, for one image and for a batch on the device."""

import math
import random

import torch
from torch import Tensor

# The usual ranges: the crop's share of the image's area, and the ratio of its sides.
_AREA = (0.08, 1.0)
_RATIO = (3 / 4, 4 / 3)
_LOG_RATIO = (math.log(_RATIO[0]), math.log(_RATIO[1]))
TRIES = 10
"""A crop that does not lie within the image is drawn again, at most this often."""


def random_box(height: int, width: int, chance: random.Random) -> tuple[int, int, int, int]:
    """Return top, left, height and width of a random crop, with ImageNet's usual area and ratio, or of the centre."""
    for _ in range(TRIES):
        area = height * width * chance.uniform(*_AREA)
        ratio = math.exp(chance.uniform(*_LOG_RATIO))
        w, h = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 0 < w <= width and 0 < h <= height:
            return chance.randint(0, height - h), chance.randint(0, width - w), h, w
    h, w = _centre(height, width)
    return (height - h) // 2, (width - w) // 2, h, w


def random_boxes(height: int, width: int, place: Tensor, shape: Tensor) -> Tensor:
    """Return (4, B) top, left, height and width like :func:`random_box`, from uniform numbers.

    ``place`` is (2, B), for top and left; ``shape`` is (2 * TRIES, B), for areas and ratios.
    """
    area, ratio = shape.unflatten(0, (2, TRIES))
    area = (_AREA[0] + (_AREA[1] - _AREA[0]) * area) * (height * width)
    ratio = torch.exp(_LOG_RATIO[0] + (_LOG_RATIO[1] - _LOG_RATIO[0]) * ratio)
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
    return min(height, round(width / _RATIO[0])), min(width, round(height * _RATIO[1]))
