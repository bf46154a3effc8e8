"""Convolutions with very few outputs, such as DenseNet's, as matrix products.

A convolution with a 3x3 kernel is nine products of the image with a slice of the kernel, each shifted by its tap, and
summed. As one product the nine slices stand side by side: twelve outputs are 108 columns, a shape that matrix products
are fast at, where convolution kernels leave most of their tile of 64 or more outputs empty. Its gradients are products,
too: of the nine shifted copies of the output's gradient.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from softprune.fused.training.nodes import Convolution, layout_of
from softprune.hardware import alignment_padding

MOST_OUTPUTS = 16
"""More fill a convolution kernel's tile, and nine times as many columns would be written and read for nothing."""
MOST_COLUMNS = 5
"""For each input: beyond that the product is mostly written and read."""
MOST_ELEMENTS = 2**25
"""Of the product with all its columns: memory that is not to be spent where large images keep a GPU busy anyway."""


def is_thin(convolution: Convolution) -> bool:
    """Whether few outputs come from more inputs, of images that are not large, in steps of one, beyond 1x1."""
    outputs, inputs = convolution.widths
    taps = convolution.kernel[0] * convolution.kernel[1]
    columns = taps * outputs
    if not (taps > 1 and outputs <= MOST_OUTPUTS and outputs < inputs and columns <= MOST_COLUMNS * inputs):
        return False
    pixels = convolution.image.numel() // inputs
    if not 0 < pixels * columns <= MOST_ELEMENTS:
        return False
    arguments = convolution.arguments
    steps = [_pair(arguments.get(name, 1)) for name in ("stride", "dilation")]
    padding = _pair(arguments.get("padding", 0))
    if steps != [(1, 1), (1, 1)] or padding is None:
        return False
    # On an image smaller than the kernel a tap may lie beyond it altogether.
    sizes = zip(convolution.image.shape[2:], padding, convolution.kernel, strict=True)
    return all(size + pad >= kernel - 1 for size, pad, kernel in sizes)


def multiply_out(convolution: Convolution) -> None:
    """Put the product in the convolution's place."""
    node, arguments, result = convolution.node, convolution.arguments, convolution.result
    padding = _pair(arguments.get("padding", 0))
    with convolution.graph.inserting_before(node):
        product = convolution.call(
            convolve_by_product, arguments["input"], arguments["weight"], padding, result.dtype
        )
        if arguments.get("bias") is not None:
            bias = convolution.call(torch.reshape, arguments["bias"], (-1, 1, 1))
            product = convolution.call(torch.add, product, convolution.call(Tensor.to, bias, result.dtype))
        # What follows may rely on the strides that it was traced with.
        same = convolution.call(Tensor.contiguous, product, memory_format=layout_of(result))
    node.replace_all_uses_with(same)
    convolution.graph.erase_node(node)


def convolve_by_product(
    image: Tensor, weight: Tensor, padding: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """What conv2d gives for a stride of one, in steps that autograd and the compiler can read."""
    outputs, inputs, *kernel = weight.shape
    taps = kernel[0] * kernel[1]
    more = alignment_padding(inputs)
    # Casts and zeros come before the reordering, so that the kernel before writes all of it at once.
    pixels = F.pad(image.to(dtype).permute(0, 2, 3, 1), (0, more))
    weight = _Ordered.apply(weight)  # type: ignore[no-untyped-call]
    # Taps in reverse: the gradient's come in this order by themselves.
    columns = weight.to(dtype).flip(2, 3).permute(1, 2, 3, 0).reshape(inputs, taps * outputs)
    columns = F.pad(columns, (0, alignment_padding(taps * outputs), 0, more))
    product = (pixels.reshape(-1, inputs + more) @ columns).view(*pixels.shape[:3], -1)
    summed: Tensor = _SumOfTaps.apply(product, (*kernel, outputs), padding)  # type: ignore[no-untyped-call]
    return summed.permute(0, 3, 1, 2)


class _Ordered(torch.autograd.Function):
    """A weight as it is, whose gradient has the weight's memory order: any other is copied once more by autograd."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.layout = layout_of(weight) or torch.preserve_format
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].clone(memory_format=ctx.layout)


class _SumOfTaps(torch.autograd.Function):
    """Shift each tap's columns into place and sum them: (N, H, W, columns) to (N, H', W', outputs); taps in reverse.

    Autograd would take the gradient apart into a kernel for each tap. Here it is one copy out of a padded tensor, in
    which the taps of a kernel's row lie side by side for every pixel.
    """

    @staticmethod
    def forward(ctx: Any, product: Tensor, shape: tuple[int, int, int], padding: tuple[int, int]) -> Tensor:
        ctx.padding, ctx.shape, ctx.columns = padding, shape, product.shape[3]
        high, wide, outputs = shape
        slices = product.narrow(3, 0, high * wide * outputs).unflatten(3, shape)
        total: Any = 0
        for row in range(high):
            for column in range(wide):
                top, left = padding[0] - row, padding[1] - column
                bottom, right = 2 * padding[0] - high + 1 - top, 2 * padding[1] - wide + 1 - left
                piece = slices[:, :, :, high - 1 - row, wide - 1 - column].to(_summed_in(product.dtype))
                total = total + F.pad(piece, (0, 0, left, right, top, bottom))
        return total.to(product.dtype)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (high, wide, _), (top, left), (gradient,) = ctx.shape, ctx.padding, gradients
        top, left = high - 1 - top, wide - 1 - left
        padded = F.pad(gradient, (0, 0, left, left, top, top)).clone(memory_format=torch.contiguous_format)
        words = _in_words(padded)
        images, rows, columns, length = words.shape
        size = (images, rows - high + 1, columns - wide + 1, high, wide * length)
        image, row, column, _ = words.stride()
        taps = words.as_strided(size, (image, row, column, row, 1)).flatten(3)
        whole = ctx.columns * gradient.itemsize // words.itemsize
        return F.pad(taps, (0, whole - taps.shape[3])).view(gradient.dtype), None, None


def _in_words(tensor: Tensor) -> Tensor:
    """Read as whole numbers of up to eight bytes along the last dimension: a copy of fewer and wider elements."""
    length = tensor.shape[-1] * tensor.itemsize
    for dtype in (torch.int64, torch.int32):
        if length % dtype.itemsize == 0 and tensor.itemsize < dtype.itemsize:
            return tensor.view(dtype)
    return tensor


def _summed_in(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _pair(value: Any) -> tuple[int, int] | None:
    """A number or two as two; None for a word ("same")."""
    if isinstance(value, int):
        return value, value
    if isinstance(value, (tuple, list)) and all(isinstance(each, int) for each in value):
        return (value[0], value[-1])
    return None
