"""Random erasing (Zhong et al., 2020): which rectangle of an image is removed."""

import math

import torch
from torch import Tensor

# The usual ranges: share of the image's area, and ratio of the rectangle's sides.
_AREA = (0.02, 0.33)
_RATIO = 3.3
DRAWS = 5
"""Uniform numbers that each image takes."""


def erased_pixels(u: Tensor, probability: float, height: int, width: int) -> Tensor:
    """Return which pixels random erasing removes, (B, height, width), from uniform numbers (DRAWS, B)."""
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
