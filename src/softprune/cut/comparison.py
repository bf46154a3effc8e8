"""Run two networks and compare their outputs: inputs, settings of the run, and the measure of difference."""

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from softprune.graph import Example
from softprune.graph.example import leaves_of
from softprune.graph.reader import PROCESS_WIDE

FAINT = 1e-5
"""The scale of an output is at least this share of the largest output's scale."""


# --- inputs ----------------------------------------------------------------------------------------------------

Resize = Callable[[int], int]

SCALES = (1.0, 30.0, 0.1)
"""The samples of a random input have these scales in turn: a cut may be exact only near inputs of one scale."""
BESIDE_EXAMPLE = (30.0, 0.1, 1.0)
"""The scales of samples that are compared beside the example, which has its own."""


def random_inputs(example: Example, seed: int) -> Iterator[Example]:
    """Yield random inputs of another batch size, in order of preference: small, larger, as large as `example`.

    The last one has the batch size of `example`, for networks that take no other.
    """
    batch = example.batch_size()
    base = example if batch is None else example.with_batch(2 if batch != 2 else 3)
    for resize in (smallest, smaller, larger, None):
        yield noise(base, seed, resize, BESIDE_EXAMPLE)
    if batch is not None:
        yield noise(example, seed, scales=BESIDE_EXAMPLE)


def noise(example: Example, seed: int, resize: Resize | None = None, scales: Sequence[float] = SCALES) -> Example:
    """Return `example` with random numbers in its floating tensors, sample by sample in the `scales`.

    A tensor without dimensions, such as a temperature, is kept. `resize` gives each spatial size. A volume is never
    enlarged: its cost grows with the cube of its sizes.
    """
    batched = example.batch_size() is not None
    generator = torch.Generator().manual_seed(seed)

    def drawn(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or not tensor.ndim:
            return tensor
        space: Sequence[int] = tensor.shape[2:]
        resized = space if resize is None else [resize(size) for size in space]
        if len(space) < 3 or math.prod(resized) < math.prod(space):
            space = resized
        shape: Sequence[int] = (*tensor.shape[:2], *space)
        values = torch.randn(*shape, generator=generator, dtype=torch.float64)
        if batched:
            for number, scale in enumerate(scales):
                values[number :: len(scales)] *= scale
        return values.to(tensor.device, tensor.dtype)

    return example.map(drawn)


def shapes_of(example: Example) -> str:
    """Return the shapes of the inputs for a message."""
    return ", ".join("x".join(map(str, tensor.shape)) or "scalar" for tensor in example.tensors())


def smaller(size: int) -> int:
    """Return a spatial size below `size` with many factors of two, since networks halve it repeatedly."""
    if size > 64:
        return 32 * max(round(size / 64), 2)
    return max(8 * (3 * size // 32), 8) if size > 16 else larger(size)


def smallest(size: int) -> int:
    """Return a spatial size of at most 64, half of `size` where that is at least 16."""
    return 64 if size > 64 else 8 * (size // 16) if size >= 32 else smaller(size)


def larger(size: int) -> int:
    """Return a spatial size above `size`."""
    return size + 32 if size > 64 else size + 8


# --- settings --------------------------------------------------------------------------------------------------


@contextmanager
def one_thread() -> Iterator[None]:
    """Run on one thread. With more, each of many small operations waits for the slowest thread, on a busy machine a
    hundred times longer."""
    # One after another: threads that start meanwhile would find 1, and restore it.
    with PROCESS_WIDE:
        found = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(found)


@contextmanager
def without_gc() -> Iterator[None]:
    """Switch the garbage collector off: reading and cutting make many objects, all of which it visits each time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# --- outputs ---------------------------------------------------------------------------------------------------


def outputs_of(model: nn.Module, example: Example) -> list[Tensor]:
    """Return copies of all tensors that one call of `model` returns. In-place changes of inputs affect copies only."""
    call = example.map(torch.clone)
    with torch.no_grad():
        output = model(*call.args, **call.kwargs)
    # Not the tensors themselves: they may be buffers, which the next call writes to.
    return [leaf.clone() for leaf in leaves_of(output) if isinstance(leaf, Tensor)]


def are_finite(outputs: Iterable[Tensor]) -> bool:
    """Return whether there is a finite number among the outputs: without one, a comparison proves nothing."""
    return any(bool(output.isfinite().any()) for output in outputs)


def by_sample(outputs: Sequence[Tensor], example: Example) -> list[Tensor]:
    """Split outputs with a batch dimension into samples, each of which then has its own scale in :func:`compare`."""
    batch = example.batch_size()
    pieces: list[Tensor] = []
    for output in outputs:
        pieces += output.unbind(0) if output.ndim > 1 and output.shape[0] == batch else [output]
    return pieces


def outputs_and_foreign(model: nn.Module, example: Example, *originals: nn.Module) -> tuple[list[Tensor], list[str]]:
    """Return the outputs of `model`, and the names of the parameters of `originals` that the call reads.

    A deep copy shares what it cannot copy: functions, and the modules that they keep. Such a copy computes with the
    layers of the original.
    """
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    with _StorageReads() as reads:
        outputs = outputs_of(model, example)
    foreign = reads.pointers - own - {0}  # tensors without elements have no storage
    names = [
        name
        for original in originals
        for name, parameter in original.named_parameters()
        if parameter.untyped_storage().data_ptr() in foreign
    ]
    return outputs, names


class _StorageReads(TorchDispatchMode):
    """Notes the storage of every tensor that an operator reads."""

    def __init__(self) -> None:
        super().__init__()
        self.pointers: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._note((args, *kwargs.values()))
        return func(*args, **kwargs)

    def _note(self, values: Sequence[Any]) -> None:
        for value in values:  # operators take tensors and lists of them, so that pytree's generality is not needed
            if isinstance(value, Tensor):
                if value.layout == torch.strided:
                    self.pointers.add(value.untyped_storage().data_ptr())
            elif isinstance(value, (list, tuple)):
                self._note(value)


def compare(expected: Sequence[Tensor], got: Sequence[Tensor]) -> tuple[float, float]:
    """Return (difference, scale) of the output that differs most, relative to its own scale.

    Infinities and NaNs must be the same ones; the difference is infinite where they, the shapes or the number of
    outputs differ.
    """
    if len(expected) != len(got) or any(a.shape != b.shape for a, b in zip(expected, got, strict=True)):
        return math.inf, 1.0
    pairs = [_difference(a.double(), b.double()) for a, b in zip(expected, got, strict=True) if a.numel()]
    if not pairs:
        return 0.0, 0.0
    # An output that cancels to nearly zero beside large ones has their rounding errors.
    least = FAINT * max(scale for _, scale in pairs)
    pairs = [(difference, max(scale, least)) for difference, scale in pairs]
    return max(pairs, key=lambda pair: pair[0] / max(pair[1], 1e-30))


def _difference(expected: Tensor, got: Tensor) -> tuple[float, float]:
    """Return the largest difference and the largest value over finite elements."""
    finite = expected.isfinite()
    if not torch.equal(finite, got.isfinite()) or not torch.allclose(expected[~finite], got[~finite], equal_nan=True):
        return math.inf, 1.0
    if not finite.any():
        return 0.0, 0.0
    expected, got = expected[finite], got[finite]
    return (expected - got).abs().max().item(), expected.abs().max().item()
