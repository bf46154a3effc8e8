"""Prove a cut: the compact network computes what the masked one computed, in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from softprune.errors import VerificationError
from softprune.graph import Example, ExampleLike
from softprune.surgery.apply import plans_of

TOLERANCE = 1e-10
"""Largest difference allowed in float64, relative to the largest output."""


@dataclass(frozen=True)
class Certificate:
    """What was compared, and how close it was."""

    max_difference: float
    """Largest |masked - compact| over all outputs and inputs tried."""
    scale: float
    """Largest |output| of the masked network."""
    inputs: tuple[str, ...]
    """Shapes of the inputs tried."""
    tolerance: float = TOLERANCE

    def __str__(self) -> str:
        return (
            f"masked == compact: largest difference {self.max_difference:.1e} at output scale {self.scale:.1e} "
            f"(float64, inputs {'; '.join(self.inputs)})"
        )


def verify(
    masked: nn.Module,
    compact: nn.Module,
    example: ExampleLike,
    *,
    tolerance: float = TOLERANCE,
    seed: int = 0,
) -> Certificate:
    """Compare both networks in float64 and eval mode on `example` and on random inputs of other sizes.

    Raises a VerificationError that names the first module which differs. Neither network is changed.
    """
    reference, candidate = _frozen_copy(masked), _frozen_copy(compact)
    given = Example.of(example).to_model(reference)
    worst, scale, tried = 0.0, 0.0, []
    for attempt in (given, *_others(given, seed)):
        try:
            expected = _run(reference, attempt)
        except Exception:
            if attempt is given:
                raise
            continue  # the dense network itself does not take this size
        shape = _shapes(attempt)
        try:
            got = _run(candidate, attempt)
        except Exception as error:
            raise VerificationError(
                f"a compact network must run wherever the masked one does. Got {type(error).__name__} on input "
                f"{shape}: {error}. Nothing was changed; please report the network."
            ) from error
        difference, size = _compare(expected, got)
        if not difference <= tolerance * max(size, 1e-30):
            culprit = _first_difference(reference, candidate, attempt, tolerance)
            raise VerificationError(
                f"a compact network must equal the masked one to {tolerance:g} of its output. Got a difference of "
                f"{difference:.3g} at output scale {size:.3g} on input {shape}, first seen at '{culprit}'. Nothing was "
                "changed; exclude that module from pruning, and please report the network."
            )
        worst, scale = max(worst, difference), max(scale, size)
        tried.append(shape)
    return Certificate(worst, scale, tuple(tried), tolerance)


def _frozen_copy(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).double().eval()


def _run(model: nn.Module, example: Example) -> list[Tensor]:
    with torch.no_grad():
        output = model(*example.args, **example.kwargs)
    return [leaf for leaf in pytree.tree_leaves(_plain(output)) if isinstance(leaf, Tensor)]


def _plain(output: Any) -> Any:
    """Model outputs that are dict-like (Hugging Face) as dicts."""
    return dict(output) if hasattr(output, "keys") and not isinstance(output, dict) else output


def _others(given: Example, seed: int) -> list[Example]:
    """Random inputs: the given sizes at another batch, and other spatial sizes."""
    generator = torch.Generator().manual_seed(seed)

    def noise(tensor: Tensor, shape: Sequence[int]) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(tensor.device, tensor.dtype)

    batch = given.batch_size()
    base = given if batch is None else given.with_batch(2 if batch != 2 else 3)
    same = base.map(lambda tensor: noise(tensor, tensor.shape))

    def resized(tensor: Tensor) -> Tensor:
        if tensor.ndim < 4:
            return noise(tensor, tensor.shape)
        space = [max(size // 2 + size // 8, 8) if size > 64 else size + 8 for size in tensor.shape[2:]]
        return noise(tensor, (*tensor.shape[:2], *space))

    return [same, base.map(resized)]


def _shapes(example: Example) -> str:
    return ", ".join("x".join(map(str, tensor.shape)) for tensor in example.tensors())


def _compare(expected: Sequence[Tensor], got: Sequence[Tensor]) -> tuple[float, float]:
    """(largest difference, largest reference value); infinite where shapes or NaNs differ."""
    if len(expected) != len(got):
        return math.inf, 1.0
    worst, scale = 0.0, 0.0
    for a, b in zip(expected, got, strict=True):
        if a.shape != b.shape:
            return math.inf, 1.0
        if a.numel() == 0:
            continue
        difference = (a.double() - b.double()).abs().max().item()
        worst = math.inf if math.isnan(difference) else max(worst, difference)
        scale = max(scale, a.double().abs().max().item())
    return worst, scale


def _first_difference(reference: nn.Module, candidate: nn.Module, example: Example, tolerance: float) -> str:
    """The first cut module, in order of execution, whose kept outputs differ."""
    plan = plans_of(candidate)[-1]
    names = [name for name, cut in plan.modules.items() if not cut.void and name not in plan.floored]
    expected, got = _outputs(reference, names, example), _outputs(candidate, names, example)
    for name, dense in expected.items():
        small = got.get(name)
        if not isinstance(dense, Tensor) or not isinstance(small, Tensor):
            continue
        dim = -1 if plan.modules[name].kind == "linear" else 1
        kept = dense.index_select(dim, torch.tensor(plan.modules[name].outputs, device=dense.device))
        difference, size = _compare([kept], [small])
        if not difference <= tolerance * max(size, 1e-30):
            return name
    return "the model's own forward"


def _outputs(model: nn.Module, names: Sequence[str], example: Example) -> dict[str, Any]:
    """The output of each module's first call, in the order of the calls."""
    outputs: dict[str, Any] = {}

    def remember(name: str) -> Any:
        return lambda module, args, output: outputs.setdefault(name, output)

    handles = [model.get_submodule(name).register_forward_hook(remember(name)) for name in names]
    try:
        _run(model, example)
    finally:
        for handle in handles:
            handle.remove()
    return outputs
