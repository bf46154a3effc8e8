"""The operators of joined convolutions: into a wide stream with its shortcut, and out of it again."""

import logging
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from softprune.fused.inference.operator import conv2d_relu, has_kernel

logger = logging.getLogger(__name__)

Launch = Callable[..., tuple[Tensor, Tensor | None] | None]
_ONE, _NONE = [1, 1], [0, 0]


@torch.library.custom_op("softprune::widen_relu", mutates_args=())
def widen_relu(
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    shortcut: Tensor,
    shortcut_weight: Tensor,
    stride: int,
) -> Tensor:
    """relu(conv2d(image, weight, bias) + conv2d(shortcut, shortcut_weight)), both of single pixels."""
    stream, _ = _launch(image, weight, bias, None, shortcut, shortcut_weight, stride, None, None)
    return stream


@torch.library.custom_op("softprune::widen_narrow_relu", mutates_args=())
def widen_narrow_relu(
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    shortcut: Tensor | None,
    shortcut_weight: Tensor | None,
    stride: int,
    next_weight: Tensor,
    next_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """stream = relu(conv2d(image, weight, bias) + other or + conv2d(shortcut)), and relu(conv2d(stream, next))."""
    stream, narrow = _launch(
        image, weight, bias, other, shortcut, shortcut_weight, stride, next_weight, next_bias
    )
    assert narrow is not None
    return stream, narrow


@widen_relu.register_fake
def _(
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    shortcut: Tensor,
    shortcut_weight: Tensor,
    stride: int,
) -> Tensor:
    return F.conv2d(image, weight, bias)


@widen_narrow_relu.register_fake
def _(
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    shortcut: Tensor | None,
    shortcut_weight: Tensor | None,
    stride: int,
    next_weight: Tensor,
    next_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    stream = F.conv2d(image, weight, bias)
    return stream, F.conv2d(stream, next_weight, next_bias)


WIDEN = torch.ops.softprune.widen_relu.default
WIDEN_NARROW = torch.ops.softprune.widen_narrow_relu.default
"""The same, as graphs name them."""


def _launch(
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    shortcut: Tensor | None,
    shortcut_weight: Tensor | None,
    stride: int,
    next_weight: Tensor | None,
    next_bias: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """One kernel in half precision on an NVIDIA GPU where all images have channels last, several elsewhere."""
    images = [each for each in (image, other, shortcut) if each is not None]
    launch = _kernel(image.device) if image.numel() and has_kernel(image.device, image.dtype) else None
    if launch is not None and all(each.is_contiguous(memory_format=torch.channels_last) for each in images):
        found = launch(image, weight, bias, other, shortcut, shortcut_weight, stride, next_weight, next_bias)
        if found is not None:
            return found
    if shortcut is not None and shortcut_weight is not None:
        other = F.conv2d(shortcut, shortcut_weight, None, stride)
    stream = conv2d_relu(image, weight, bias, other, _ONE, _NONE, _ONE, 1)
    if next_weight is None:
        return stream, None
    return stream, conv2d_relu(stream, next_weight, next_bias, None, _ONE, _NONE, _ONE, 1)


@cache
def _kernel(device: torch.device) -> Launch | None:
    """The kernel, if it can be compiled here: Triton may be missing, or the C compiler that it needs."""
    try:
        from softprune.fused.inference.pair_kernel import launch

        image = torch.zeros(1, 16, 4, 4, device=device, dtype=torch.float16).to(
            memory_format=torch.channels_last
        )
        weight = torch.zeros(16, 16, 1, 1, device=device, dtype=torch.float16)
        launch(image, weight, None, image, None, None, 1, weight, None)
    except Exception as error:  # whatever a compiler comes up with: there is another way
        logger.warning("joined convolutions run one by one, since Triton has no kernel for them: %s", error)
        return None
    return launch
