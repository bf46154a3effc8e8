"""A Triton kernel for two convolutions of single pixels, one behind the other, at a wide stream of images.

The stream is written and read by every block of a network and is wider than what pruning leaves inside the blocks, so
that memory is all its time. Here a block of pixels stays on the chip: it is widened, its shortcut is added (or
computed, where it is a convolution), and what the next block reads of it is narrowed at once, without reading it back.
"""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

ROWS, COLUMNS = 64, 64
"""Pixels and channels of the stream that a program works on at a time: the fastest of eight tried on an H200."""

_TOO_LARGE: set[tuple[object, ...]] = set()
"""What did not fit onto a chip."""


def launch(
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    shortcut: Tensor | None,
    shortcut_weight: Tensor | None,
    stride: int,
    next_weight: Tensor | None,
    next_bias: Tensor | None,
) -> tuple[Tensor, Tensor | None] | None:
    """relu(conv(image) + other, or + conv(shortcut)), and relu(conv()) of that; all images have channels last.

    None where the GPU has too little memory on its chip.
    """
    batch, inputs, height, width = image.shape
    outputs = weight.shape[0]
    stream = _images(image, outputs)
    narrow = None if next_weight is None else _images(image, next_weight.shape[0])
    source = image if shortcut is None else shortcut
    rows = batch * height * width
    # The kernel reads constants row by row, and converted networks may have them in any order.
    constants = (weight, bias, shortcut_weight, next_weight, next_bias)
    weight, bias, shortcut_weight, next_weight, next_bias = map(_row_by_row, constants)  # type: ignore[assignment]
    sizes = (str(image.device), inputs, outputs, *source.shape[1:2], 0 if narrow is None else narrow.shape[1])
    if sizes in _TOO_LARGE:
        return None
    # What is missing is never read: any tensor stands in for it.
    arguments = (
        image,
        weight,
        weight if bias is None else bias,
        stream if other is None else other,
        source,
        weight if shortcut_weight is None else shortcut_weight,
        weight if next_weight is None else next_weight,
        weight if next_bias is None else next_bias,
        stream,
        stream if narrow is None else narrow,
        rows,
        width,
        height * width,
        source.shape[3],
        source.shape[2] * source.shape[3],
    )
    options = {
        "K": inputs,
        "N": outputs,
        "K2": 0 if shortcut is None else shortcut.shape[1],
        "N2": 0 if narrow is None else narrow.shape[1],
        "K_POWER": _power(inputs),
        "K2_POWER": _power(source.shape[1]),
        "N2_POWER": _power(outputs if narrow is None else narrow.shape[1]),
        "STRIDE": stride,
        "HAS_BIAS": bias is not None,
        "HAS_OTHER": other is not None,
        "HAS_NEXT_BIAS": next_bias is not None,
        "ROWS": ROWS,
        "COLUMNS": COLUMNS,
        "num_warps": 4,
        "num_stages": 2,
    }
    try:
        # Triton launches on the device in force, which need not be the image's.
        with torch.cuda.device(image.device) if image.is_cuda else nullcontext():
            _kernel[(triton.cdiv(rows, ROWS),)](*arguments, **options)
    except OutOfResources:
        _TOO_LARGE.add(sizes)
        return None
    return stream, narrow


def _row_by_row(constant: Tensor | None) -> Tensor | None:
    return None if constant is None else constant.contiguous()


def _images(like: Tensor, channels: int) -> Tensor:
    batch, _, height, width = like.shape
    shape = (batch, channels, height, width)
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def _power(width: int) -> int:
    """Triton's tiles have sides of powers of two, and products sides of at least sixteen."""
    return max(16, int(triton.next_power_of_2(width)))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _kernel(  # type: ignore[no-untyped-def, unused-ignore]  # Triton reads what annotations name
    image,
    weight,
    bias,
    other,
    shortcut,
    shortcut_weight,
    next_weight,
    next_bias,
    stream,
    narrow,
    rows,
    width,
    pixels,
    shortcut_width,
    shortcut_pixels,
    K: tl.constexpr,
    N: tl.constexpr,
    K2: tl.constexpr,
    N2: tl.constexpr,
    K_POWER: tl.constexpr,
    K2_POWER: tl.constexpr,
    N2_POWER: tl.constexpr,
    STRIDE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_OTHER: tl.constexpr,
    HAS_NEXT_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None]
    far = row.to(tl.int64)
    inner = tl.arange(0, K_POWER)
    tile = tl.load(image + far[:, None] * K + inner[None, :], mask=inside & (inner < K)[None, :], other=0.0)
    if K2 > 0:
        place = row % pixels
        below, beside = place // width * STRIDE, place % width * STRIDE
        start = (row // pixels).to(tl.int64) * shortcut_pixels + below * shortcut_width + beside
        inner2 = tl.arange(0, K2_POWER)
        tile2 = tl.load(
            shortcut + start[:, None] * K2 + inner2[None, :], mask=inside & (inner2 < K2)[None, :], other=0.0
        )
    if N2 > 0:
        outer = tl.arange(0, N2_POWER)
        narrowed = tl.zeros([ROWS, N2_POWER], tl.float32)
    for first in range(0, N, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        exists = column < N
        taps = tl.load(
            weight + column[None, :] * K + inner[:, None],
            mask=(inner < K)[:, None] & exists[None, :],
            other=0.0,
        )
        total = tl.dot(tile, taps)
        if K2 > 0:
            taps2 = tl.load(
                shortcut_weight + column[None, :] * K2 + inner2[:, None],
                mask=(inner2 < K2)[:, None] & exists[None, :],
                other=0.0,
            )
            total = tl.dot(tile2, taps2, total)
        if HAS_BIAS:
            total += tl.load(bias + column, mask=exists, other=0.0)[None, :].to(tl.float32)
        where = far[:, None] * N + column[None, :]
        if HAS_OTHER:
            total += tl.load(other + where, mask=inside & exists[None, :], other=0.0).to(tl.float32)
        result = tl.maximum(total, 0.0).to(stream.dtype.element_ty)
        tl.store(stream + where, result, mask=inside & exists[None, :])
        if N2 > 0:
            following = tl.load(
                next_weight + outer[None, :] * N + column[:, None],
                mask=(outer < N2)[None, :] & exists[:, None],
                other=0.0,
            )
            narrowed = tl.dot(result, following, narrowed)
    if N2 > 0:
        if HAS_NEXT_BIAS:
            narrowed += tl.load(next_bias + outer, mask=outer < N2, other=0.0)[None, :].to(tl.float32)
        tl.store(
            narrow + far[:, None] * N2 + outer[None, :],
            tl.maximum(narrowed, 0.0).to(narrow.dtype.element_ty),
            mask=inside & (outer < N2)[None, :],
        )
