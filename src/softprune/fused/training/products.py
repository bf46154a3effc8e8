"""Convolutions with very few outputs, such as DenseNet's, as matrix products.

A convolution with a 3x3 kernel is the sum of nine products of the image with a slice of the kernel, each shifted by its
tap. With the nine slices side by side it is one product: twelve outputs give 108 columns, a fast shape for matrix
products, while convolution kernels leave most of a tile of 64 outputs empty. The gradients are products as well.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from softprune.fused.training.convolutions import TracedConvolution, layout_of
from softprune.hardware import alignment_padding

MOST_OUTPUTS = 16
"""More outputs fill the tile of a convolution kernel, and the product would write nine times the columns."""
MOST_COLUMNS = 5
"""Columns per input channel. With more, writing and reading the product dominates."""
MOST_ELEMENTS = 2**25
"""Elements of the product, a limit on memory. Large images keep a GPU busy without it."""


def is_thin(convolution: TracedConvolution) -> bool:
    """Return whether the convolution has few outputs, stride one, a kernel above 1x1 and images that are not large."""
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
    # On an image smaller than the kernel a tap may lie outside of it.
    sizes = zip(convolution.image.shape[2:], padding, convolution.kernel, strict=True)
    return all(size + pad >= kernel - 1 for size, pad, kernel in sizes)


def replace_by_product(convolution: TracedConvolution) -> None:
    """Replace the convolution by a matrix product."""
    node, arguments, result = convolution.node, convolution.arguments, convolution.result
    padding = _pair(arguments.get("padding", 0))
    with convolution.graph.inserting_before(node):
        product = convolution.call(convolve_by_product, arguments["input"], arguments["weight"], padding, result.dtype)
        if arguments.get("bias") is not None:
            bias = convolution.call(torch.reshape, arguments["bias"], (-1, 1, 1))
            product = convolution.call(torch.add, product, convolution.call(Tensor.to, bias, result.dtype))
        # Later nodes may rely on the strides of the trace.
        same = convolution.call(Tensor.contiguous, product, memory_format=layout_of(result))
    node.replace_all_uses_with(same)
    convolution.graph.erase_node(node)


def convolve_by_product(image: Tensor, weight: Tensor, padding: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Compute conv2d with stride one by operations that autograd and the compiler handle."""
    outputs, inputs, *kernel = weight.shape
    taps = kernel[0] * kernel[1]
    more = alignment_padding(inputs)
    # Cast and pad before the permutation, so that the preceding kernel writes everything at once.
    pixels = F.pad(image.to(dtype).permute(0, 2, 3, 1), (0, more))
    weight = _Ordered.apply(weight)  # type: ignore[no-untyped-call]
    # Taps in reverse, which is the order of the gradient.
    columns = weight.to(dtype).flip(2, 3).permute(1, 2, 3, 0).reshape(inputs, taps * outputs)
    columns = F.pad(columns, (0, alignment_padding(taps * outputs), 0, more))
    product = (pixels.reshape(-1, inputs + more) @ columns).view(*pixels.shape[:3], -1)
    summed: Tensor = _SumOfTaps.apply(product, (*kernel, outputs), padding)  # type: ignore[no-untyped-call]
    return summed.permute(0, 3, 1, 2)


class _Ordered(torch.autograd.Function):
    """The identity, whose gradient has the memory format of the weight: autograd copies any other once more."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.layout = layout_of(weight) or torch.preserve_format
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].clone(memory_format=ctx.layout)


class _SumOfTaps(torch.autograd.Function):
    """Shift the columns of each tap and sum them: (N, H, W, columns) to (N, H', W', outputs), taps in reverse.

    Autograd would use one kernel per tap for the gradient. Here it is one copy from a padded tensor in which the taps
    of a kernel row are adjacent for every pixel.
    """

    @staticmethod
    def forward(ctx: Any, product: Tensor, shape: tuple[int, int, int], padding: tuple[int, int]) -> Tensor:
        ctx.padding, ctx.shape, ctx.columns = padding, shape, product.shape[3]
        high, wide, outputs = shape
        slices = product.narrow(3, 0, high * wide * outputs).unflatten(3, shape)
        summed_in = torch.promote_types(product.dtype, torch.float32)
        total: Any = 0
        for row in range(high):
            for column in range(wide):
                top, left = padding[0] - row, padding[1] - column
                bottom, right = 2 * padding[0] - high + 1 - top, 2 * padding[1] - wide + 1 - left
                piece = slices[:, :, :, high - 1 - row, wide - 1 - column].to(summed_in)
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
    """View the last dimension as integers of up to eight bytes, so that a copy moves fewer and wider elements."""
    length = tensor.shape[-1] * tensor.itemsize
    for dtype in (torch.int64, torch.int32):
        if length % dtype.itemsize == 0 and tensor.itemsize < dtype.itemsize:
            return tensor.view(dtype)
    return tensor


def _pair(value: Any) -> tuple[int, int] | None:
    """Return one or two integers as a pair, or None for a string such as "same"."""
    if isinstance(value, int):
        return value, value
    if isinstance(value, (tuple, list)) and all(isinstance(each, int) for each in value):
        return (value[0], value[-1])
    return None
