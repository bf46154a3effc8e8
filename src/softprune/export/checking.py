"""Compare a network with what another runtime computes, on the example and on random inputs of another batch size."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from softprune.errors import ModelError, VerificationError
from softprune.export.shapes import first_line
from softprune.graph import Example
from softprune.masks import is_masked

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference between two runtimes, relative to the largest output: they add in different orders."""


@dataclass(frozen=True)
class Comparison:
    """How far apart two computations were."""

    max_difference: float
    scale: float
    inputs: tuple[str, ...]


def prepared(model: nn.Module, *, device: str = "cpu") -> nn.Module:
    """A copy of `model` in eval mode on `device`; a network that still carries masks is refused."""
    if any(is_masked(module) for module in model.modules()):
        raise ModelError(
            "a network must be cut before it is exported. Got one whose BatchNorms still carry masks; export what "
            "pruner.compact() returns (or the plain network after pruner.detach())."
        )
    return copy.deepcopy(model).to(device).eval()


def tensors_of(output: Any) -> list[Tensor]:
    """All tensors of a model's output, in order; dict-like outputs count by their values."""
    plain = dict(output) if hasattr(output, "keys") and not isinstance(output, dict) else output
    return [leaf for leaf in pytree.tree_leaves(plain) if isinstance(leaf, Tensor)]


def trials(example: Example, *, other_batch: bool) -> list[Example]:
    """The example itself, random inputs of its size, and random inputs at other batch sizes."""
    generator = torch.Generator().manual_seed(0)

    def noise(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        return torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor)

    sizes = (1, 5) if other_batch and example.batch_size() is not None else ()
    return [example, example.map(noise), *(example.with_batch(size).map(noise) for size in sizes)]


def compare(
    model: nn.Module,
    runtime: Callable[[Example], Sequence[Tensor]],
    attempts: Sequence[Example],
    *,
    what: str,
    tolerance: float | None = None,
) -> Comparison:
    """Run both on every attempt; raises a VerificationError where they differ by more than `tolerance`."""
    worst, scale, tried = 0.0, 0.0, []
    for attempt in attempts:
        shape = ", ".join("x".join(map(str, tensor.shape)) for tensor in attempt.tensors())
        try:
            with torch.no_grad():
                expected = tensors_of(model(*attempt.args, **attempt.kwargs))
            difference, size = _distance(expected, runtime(attempt))
        except Exception as error:
            # An exporter may fix a batch size that it was told to leave free, and say nothing.
            if attempt.batch_size() == attempts[0].batch_size():
                raise
            raise ModelError(
                f"{what} with a free batch size must take any. Got {type(error).__name__} for {type(model).__name__} "
                f"on input {shape}: {first_line(error)}. If forward() fixes the batch size, pass dynamic_batch=False."
            ) from error
        limit = tolerance if tolerance is not None else _tolerance(expected)
        if not difference <= limit * max(size, 1e-30):
            raise VerificationError(
                f"{what} must compute what the network computes, to {limit:g} of its output. Got a difference of "
                f"{difference:.3g} at output scale {size:.3g} on input {shape}. It was not kept."
            )
        worst, scale = max(worst, difference), max(scale, size)
        tried.append(shape)
    return Comparison(worst, scale, tuple(tried))


def _tolerance(outputs: Sequence[Tensor]) -> float:
    return max((TOLERANCES.get(output.dtype, 0.0) for output in outputs), default=0.0)


def _distance(expected: Sequence[Tensor], got: Sequence[Tensor]) -> tuple[float, float]:
    """(largest difference, largest expected value); infinite where number, shape or finiteness differ."""
    if len(expected) != len(got):
        return math.inf, 1.0
    worst, scale = 0.0, 0.0
    for left, right in zip(expected, got, strict=True):
        if left.shape != right.shape:
            return math.inf, 1.0
        if left.numel():
            difference = (left.double() - right.double()).abs().max().item()
            worst = math.inf if math.isnan(difference) else max(worst, difference)
            scale = max(scale, left.double().abs().max().item())
    return worst, scale
