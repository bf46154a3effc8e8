"""Inputs to compare two networks on: the example itself, and random ones of another batch and another size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from softprune.graph import Example

Resize = Callable[[int], int]


def random_inputs(example: Example, seed: int) -> Iterator[Example]:
    """Random inputs at another batch size, in the order of preference: smaller, larger, and as large as `example`."""
    batch = example.batch_size()
    base = example if batch is None else example.with_batch(1 if batch >= 2 else 2)
    for resize in (smaller, larger, None):
        yield noise(base, seed, resize)


def noise(example: Example, seed: int, resize: Resize | None = None) -> Example:
    """`example` with random numbers in its floating tensors, and their spatial sizes changed."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        space = tensor.shape[2:] if resize is None else [resize(size) for size in tensor.shape[2:]]
        shape: Sequence[int] = (*tensor.shape[:2], *space)
        values = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return values.to(tensor.device, tensor.dtype)

    return example.map(drawn)


def smaller(size: int) -> int:
    """A spatial size below `size`, of many factors of two, since networks halve it again and again."""
    if size > 64:
        return 32 * max(round(size / 64), 2)
    return max(8 * (3 * size // 32), 8) if size > 16 else larger(size)


def smallest(size: int) -> int:
    """The size of quick trials."""
    return 64 if size > 64 else smaller(size)


def larger(size: int) -> int:
    """A spatial size above `size`."""
    return size + 32 if size > 64 else size + 8
