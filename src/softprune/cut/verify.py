"""Verify a cut: the compact network computes what the masked network computes, in float64."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from softprune.cut import PrunePlan
from softprune.cut.apply import Change, cut_, duplicated, plain_copy, plans_of
from softprune.cut.comparison import (
    by_sample,
    compare,
    one_thread,
    outputs_and_foreign,
    quick_outputs_of,
    random_inputs,
    shapes_of,
)
from softprune.errors import ModelError, VerificationError, check_types, few_of
from softprune.graph import Example, ExampleLike, check_is_module
from softprune.masks import FixedGate, mask_
from softprune.masks.sampling import unmask_model_

TOLERANCE = 1e-10
"""Largest difference allowed in float64, relative to the largest output."""
OWN_TOLERANCE = 1e-5
"""The same for networks that run in their own dtype only."""


@dataclass(frozen=True)
class Comparison:
    """The largest difference between a network and another one, or another runtime."""

    max_difference: float
    """That of the output that differs most, over all inputs."""
    scale: float
    """Largest value of that output in the network."""
    inputs: tuple[str, ...]
    """Shapes of the inputs."""


@dataclass(frozen=True)
class Certificate(Comparison):
    """What of a masked and a compact network was compared, and how close it was."""

    tolerance: float = TOLERANCE
    dtype: str = "float64"

    def __str__(self) -> str:
        return (
            f"masked == compact: largest difference {self.max_difference:.1e} at output scale {self.scale:.1e} "
            f"({self.dtype}, inputs {'; '.join(self.inputs)})"
        )


@one_thread()
@check_types
def verify(
    masked: nn.Module, compact: nn.Module, example: ExampleLike, *, tolerance: float = TOLERANCE, seed: int = 0
) -> Certificate:
    """Compare both networks in float64 and eval mode on `example` and on a random input of another size.

    The random input also has another batch size, and samples of several scales. A network whose forward() runs in its
    own dtype only is compared in that dtype, to `OWN_TOLERANCE`. Raise a VerificationError that names the first module
    that differs. Neither network is changed.
    """
    for network in (masked, compact):
        check_is_module(network)

    def pair(dtype: torch.dtype | None) -> _Pair:
        return _Pair(
            lambda: duplicated(masked, lambda copy: _prepare_(copy, dtype)),
            lambda reference: duplicated(compact, lambda copy: _prepare_(copy, dtype)),
            (masked, compact),
        )

    return _certify_wide(pair, example, tolerance, seed)


@one_thread()
def verify_plan(plan: PrunePlan, network: nn.Module, masks: Mapping[str, Tensor], example: ExampleLike) -> Certificate:
    """Verify that `network` with hard `masks` equals `network` cut by `plan`, as :func:`verify` does.

    Constants that fold into a float32 bias are rounded there, so that a float64 network is cut.
    """

    def pair(dtype: torch.dtype | None) -> _Pair:
        def reference() -> nn.Module:
            copy = plain_copy(network, lambda copy: _prepare_(copy, dtype))
            mask_sites_(copy, {**plan.masks(), **masks})  # a site's mask holds for all of its BatchNorms
            return copy

        def cut_checked_(copy: nn.Module) -> None:
            _prepare_(copy, dtype)  # a __deepcopy__ of the network's own may have built another network
            plan.check_fits(copy)
            cut_(plan, copy)

        return _Pair(reference, lambda masked: plain_copy(masked, share=True), (network,), cut_checked_)

    return _certify_wide(pair, example, TOLERANCE, 0)


def mask_sites_(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Mask the BatchNorms of a plain model with fixed masks, in place."""
    for name, mask in masks.items():
        mask_(model.get_submodule(name), FixedGate(mask))  # type: ignore[arg-type]


@contextmanager
def masks_on(model: nn.Module, masks: Mapping[str, Tensor]) -> Iterator[None]:
    """Mask the BatchNorms of a plain model with fixed masks; remove the masks on exit."""
    mask_sites_(model, masks)
    try:
        yield
    finally:
        unmask_model_(model)


def _prepare_(copy: nn.Module, dtype: torch.dtype | None) -> None:
    """Put a copy of a network into eval mode and, unless it is None, into `dtype`."""
    (copy if dtype is None else copy.to(dtype)).eval()


@dataclass(frozen=True)
class _Pair:
    """Two networks to compare, neither of which may read a parameter of the `originals`."""

    reference: Callable[[], nn.Module]
    candidate: Callable[[nn.Module], nn.Module]
    """Makes the second network, of the first one before that is called: what forward() remembers proves nothing."""
    originals: tuple[nn.Module, ...]
    finish_: Change = lambda candidate: None
    """Completes the second network when the first one is gone. A large network needs its memory for the cut."""


class _WrongDtype(Exception):
    """The network does not run in the dtype that was tried first."""


def _certify_wide(
    pair: Callable[[torch.dtype | None], _Pair], example: ExampleLike, tolerance: float, seed: int
) -> Certificate:
    """Compare in float64, or in the networks' own dtype where they run in no other."""
    try:
        return _certify(pair(torch.float64), example, tolerance, seed)
    except _WrongDtype:
        return _certify(pair(None), example, max(tolerance, OWN_TOLERANCE), seed)


def _certify(pair: _Pair, example: ExampleLike, tolerance: float, seed: int) -> Certificate:
    """Compare the two networks of `pair`."""
    reference = pair.reference()
    candidate = pair.candidate(reference)
    accepted = _accepted(reference, Example.of(example).to_model(reference), seed)
    del reference
    pair.finish_(candidate)
    worst, scale, tried = 0.0, 0.0, []
    for attempt, expected in accepted:
        shape = shapes_of(attempt)
        try:
            got, foreign = outputs_and_foreign(candidate, attempt, *pair.originals)
        except Exception as error:
            raise VerificationError(
                f"a compact network must run wherever the masked one does. Got {type(error).__name__} on input "
                f"{shape}: {error}. Nothing was changed; please report the network."
            ) from error
        if foreign:
            raise VerificationError(
                "a compact network must compute with its own parameters. Got one that reads "
                f"{few_of('', foreign)} of the original: a function in its forward() keeps the original's modules, "
                "such as `model.forward = lambda x: ...`. Nothing was changed; write it as a method of a module."
            )
        difference, size = compare(by_sample(expected, attempt), by_sample(got, attempt))
        if not difference <= tolerance * size:
            culprit = _first_difference(pair.reference(), candidate, attempt, tolerance)
            raise VerificationError(
                f"a compact network must equal the masked one to {tolerance:g} of its output. Got a difference of "
                f"{difference:.3g} at output scale {size:.3g} on input {shape}, first seen at '{culprit}'. Nothing was "
                "changed; exclude that module from pruning, and please report the network."
            )
        if difference * scale >= worst * size:
            worst, scale = difference, size
        tried.append(shape)
    dtype = next((p.dtype for p in candidate.parameters()), torch.float64)
    return Certificate(worst, scale, tuple(tried), tolerance, str(dtype).removeprefix("torch."))


def _accepted(reference: nn.Module, given: Example, seed: int) -> list[tuple[Example, list[Tensor]]]:
    """Return the example and the first random input that the reference takes, with its outputs."""
    # More than two samples take time and show nothing new, but some networks take one batch size only.
    for example in (given.first(2), given):
        try:
            found = [(example, quick_outputs_of(reference, example))]
            break
        except Exception as error:
            failure = error
    else:
        if any(parameter.dtype == torch.float64 for parameter in reference.parameters()):
            raise _WrongDtype from failure
        raise ModelError(
            "a network must run on its example for a cut to be verified. Got "
            f"{type(failure).__name__}: {failure}. Pass an example that model.eval()(example) accepts."
        ) from failure
    for attempt in random_inputs(found[0][0], seed):
        try:
            return [*found, (attempt, quick_outputs_of(reference, attempt))]
        except Exception:
            continue  # the dense network itself does not take this size
    return found


def _first_difference(reference: nn.Module, candidate: nn.Module, example: Example, tolerance: float) -> str:
    """Return the first cut module, in order of execution, whose kept outputs differ."""
    if not plans_of(candidate):
        return "the model's own forward"
    plan = plans_of(candidate)[-1]
    names = [name for name, cut in plan.modules.items() if not cut.void and name not in plan.floored]
    expected, got = _outputs(reference, names, example), _outputs(candidate, names, example)
    for name, dense in expected.items():
        small = got.get(name)
        if not isinstance(dense, Tensor) or not isinstance(small, Tensor):
            continue
        dim = -1 if plan.modules[name].kind == "linear" else 1
        if dense.shape[dim] != plan.modules[name].width_out:
            continue  # the reference is not what the candidate was cut from
        kept = dense.index_select(dim, torch.tensor(plan.modules[name].outputs, device=dense.device))
        difference, size = compare([kept], [small])
        if not difference <= tolerance * size:
            return name
    return "the model's own forward"


def _outputs(model: nn.Module, names: Sequence[str], example: Example) -> dict[str, Any]:
    """Return the output of each module's first call, in order of the calls. `model` is a copy and keeps the hooks."""
    outputs: dict[str, Any] = {}

    def remember(name: str) -> Any:
        return lambda module, args, output: outputs.setdefault(name, output)

    for name in names:
        model.get_submodule(name).register_forward_hook(remember(name))
    quick_outputs_of(model, example)
    return outputs
