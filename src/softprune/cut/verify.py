"""Verify a cut: the compact network computes what the masked network computes, in float64 and in its own precision."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from softprune.cut.apply import cut_, duplicated, plain_copy
from softprune.cut.plan import PrunePlan
from softprune.errors import ModelError, VerificationError, few_of
from softprune.graph import Example, ExampleLike, check_is_module
from softprune.graph.reader import PROCESS_WIDE, leaves_of
from softprune.masks import mask_sites_
from softprune.module_state import state_kept

# --- inputs -----------------------------------------------------------------------------------------------------------

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
    for resize in (smallest, larger, None):
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


def smallest(size: int) -> int:
    """Return a spatial size of at most 64 with many factors of two; small sizes are enlarged."""
    return 64 if size > 64 else 8 * (size // 16) if size >= 32 else larger(size)


def larger(size: int) -> int:
    """Return a spatial size above `size`."""
    return size + 32 if size > 64 else size + 8


# --- settings ---------------------------------------------------------------------------------------------------------


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


# --- outputs ----------------------------------------------------------------------------------------------------------


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


def first_taken(attempts: Iterable[tuple[nn.Module, Example]]) -> tuple[nn.Module, Example, list[Tensor]]:
    """Return the first network and input that go together, with the outputs, which are not all infinite or NaN."""
    for model, example in attempts:
        try:
            outputs = outputs_of(model, example.to_model(model))
        except Exception as error:  # it does not take this size, or this precision
            failure = f"{type(error).__name__} from a {type(model).__name__}: {error}"
            continue
        if are_finite(outputs):
            return model, example, outputs
        failure = (
            f"only infinity and NaN from a {type(model).__name__}; look at its BatchNorm statistics (a negative "
            "running variance?) and at its weights"
        )
    raise ModelError(
        f"a network must run on its example in eval mode, and give finite outputs. Got {failure}. Pass an example that "
        "model.eval()(example) accepts."
    )


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


FAINT = 1e-5
"""The scale of an output is at least this share of the largest output's scale."""


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
    return worst_of((difference, max(scale, least)) for difference, scale in pairs)


def worst_of(pairs: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Return the (difference, scale) whose difference is the largest share of its scale."""
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


# --- the proof --------------------------------------------------------------------------------------------------------

TOLERANCE = 1e-10
"""Largest difference allowed in float64, relative to the largest output."""
OWN_TOLERANCE = 1e-5
"""The same for networks that run in their own dtype only."""
CONSTANT = 1e-9
"""Outputs for different samples that are closer, relative to the largest, are the same."""
ROUNDINGS, TIMES_MASKED = 8, 8
"""In its own precision a compact network may be off by this many units of rounding, or by this multiple of what the
masked network is off by in the same precision."""


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
    own_dtype: str | None = None
    """The network's own precision; None where it is `dtype`, or where the masked network does not run in it."""
    own_difference: float | None = None
    """Largest difference between the compact network in its own precision and the float64 outputs, by their scale."""
    own_masked: float | None = None
    """The same of the masked network: what the precision itself costs."""
    varies: bool = True
    """Whether outputs for different random samples differ; True where the network took no batch of them."""

    def __str__(self) -> str:
        own = (
            f"; in {self.own_dtype} {self.own_difference:.1e} of the scale from it, masked {self.own_masked:.1e}"
            if self.own_dtype
            else ""
        )
        return (
            f"masked == compact: largest difference {self.max_difference:.1e} at output scale {self.scale:.1e} "
            f"({self.dtype}, inputs {'; '.join(self.inputs)}){own}"
        )


@one_thread()
def verify(
    masked: nn.Module, compact: nn.Module, example: ExampleLike, *, tolerance: float = TOLERANCE, seed: int = 0
) -> Certificate:
    """Compare both networks in eval mode on `example` and on a random input of another size.

    They are compared in float64, and then each in its own precision with the outputs in float64. The random input also
    has another batch size, and samples of several scales. A network whose forward() runs in its own dtype only is
    compared in that dtype, to `OWN_TOLERANCE`. Raise a VerificationError where they differ. Neither network is
    changed.
    """
    for network in (masked, compact):
        check_is_module(network)
    proof = _Proof(duplicated(masked, share=True), duplicated(masked), example, tolerance, seed)
    found = proof.compare(proof.widened(duplicated(compact)), (masked, compact))
    return proof.compare_rounded(duplicated(compact, share=True), found)


def cut_and_verify(
    plan: PrunePlan, network: nn.Module, masks: Mapping[str, Tensor], example: ExampleLike
) -> tuple[nn.Module, Certificate]:
    """Return `network` cut by `plan`, with the certificate that it equals `network` with hard `masks`."""
    plan.check_fits(network)

    def change_(compact: nn.Module) -> None:
        plan.check_fits(compact)  # a __deepcopy__ of the network's own may have built another network
        cut_(plan, compact)

    # A site's mask holds for all of its BatchNorms.
    return changed_and_verified(network, change_, example, {**plan.masks(), **masks})


@one_thread()
def changed_and_verified(
    network: nn.Module, change_: Callable[[nn.Module], None], example: ExampleLike, masks: Mapping[str, Tensor]
) -> tuple[nn.Module, Certificate]:
    """Return a copy of `network` that `change_` changed, with the certificate that it equals `network` with `masks`.

    One copy is changed in float64, where constants fold without rounding, and compared; that copy is converted to the
    network's own dtypes, compared again and returned.
    """
    own, reference = plain_copy(network, share=True), plain_copy(network)
    for copy in (own, reference):
        mask_sites_(copy, masks)
    proof = _Proof(own, reference, example, TOLERANCE, 0)
    changed = proof.widened(plain_copy(network))
    change_(changed)
    found = proof.compare(changed, (network,))
    _narrow_(changed, network)
    return changed, proof.compare_rounded(changed, found)


def _narrow_(compact: nn.Module, network: nn.Module) -> None:
    """Convert the floating tensors of `compact`, which was cut in float64, to the dtypes that `network` has them in.

    What a cut adds (biases, outputs of removed layers and branches) has the dtype of the weights there.
    """
    named = (network.named_parameters(remove_duplicate=False), network.named_buffers(remove_duplicate=False))
    dtypes = {name: tensor.dtype for tensors in named for name, tensor in tensors}

    def own(path: str, name: str, tensor: Tensor) -> Tensor:
        while path and not any(each.startswith(f"{path}.") for each in dtypes):
            path = path.rpartition(".")[0]  # of what a cut put in the place of a branch
        prefix = f"{path}." if path else ""
        inside = (dtype for each, dtype in dtypes.items() if each.startswith(prefix) and dtype.is_floating_point)
        dtype = dtypes.get(prefix + name) or dtypes.get(f"{prefix}weight") or next(inside, tensor.dtype)
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    for path, module in compact.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                parameter.data = own(path, name, parameter.data)  # stays one where modules share it
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = own(path, name, buffer)


def _differ(tensors: Iterable[Tensor], batch: int | None) -> list[bool]:
    """Return for each floating tensor of a whole batch whether its samples differ."""
    samples = [each for each in tensors if each.is_floating_point() and each.numel() and each.ndim and batch != 1]
    samples = [each for each in samples if len(each) == batch]
    return [bool((each - each[:1]).abs().max() > CONSTANT * each.abs().max()) for each in samples]


class _Proof:
    """What a masked network gives in float64, or in its own dtype where it runs in no other.

    Args:
        own: A copy of the masked network, which is only called.
        reference: Another one, with parameters of its own.
        example: What they are called with.
        tolerance: Largest difference allowed, relative to the largest output.
        seed: That of the random input.
    """

    def __init__(self, own: nn.Module, reference: nn.Module, example: ExampleLike, tolerance: float, seed: int) -> None:
        self._own = own.eval()
        # Inputs that the own precision holds without rounding.
        given = Example.of(example).to_model(own)
        # More than two samples take time and show nothing new, but some networks take one batch size only.
        networks, inputs = (reference.double().eval(), self._own), (given.first(2), given)
        network, taken, outputs = first_taken((each, attempt) for each in networks for attempt in inputs)
        self._expected = [(taken, outputs)]
        with suppress(ModelError):  # it takes no other input
            self._expected.append(first_taken((network, drawn) for drawn in random_inputs(taken, seed))[1:])
        self._wide = network is reference
        self._tolerance = tolerance if self._wide else max(tolerance, OWN_TOLERANCE)

    def widened(self, copy: nn.Module) -> nn.Module:
        """Convert a copy of the network to the precision in which it is compared, and return it."""
        return copy.double() if self._wide else copy

    def compare(self, compact: nn.Module, originals: Sequence[nn.Module]) -> Certificate:
        """Compare `compact`, which may read no parameter of the `originals`, with the masked network."""
        found = []
        for example, expected in self._expected:
            shape = shapes_of(example)
            try:
                with state_kept(compact):
                    got, foreign = outputs_and_foreign(compact.eval(), example.to_model(compact), *originals)
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
            difference, size = compare(by_sample(expected, example), by_sample(got, example))
            if not difference <= self._tolerance * size:
                raise VerificationError(
                    f"a compact network must equal the masked one to {self._tolerance:g} of its output. Got a "
                    f"difference of {difference:.3g} at output scale {size:.3g} on input {shape}. "
                    "Nothing was changed; please report the network."
                )
            found.append((difference, size))
        dtype = next((p.dtype for p in compact.parameters()), torch.float64)
        shapes = tuple(shapes_of(example) for example, _ in self._expected)
        made = Certificate(*worst_of(found), shapes, self._tolerance, str(dtype).removeprefix("torch."))
        return replace(made, varies=self._varies())

    def _varies(self) -> bool:
        """Return whether outputs depend on the input, where samples that differ tell."""
        told = []
        for example, outputs in self._expected:
            results = _differ(outputs, example.batch_size())
            if results and any(_differ(example.tensors(), example.batch_size())):
                told.append(any(results))
        return all(told)

    def compare_rounded(self, compact: nn.Module, found: Certificate) -> Certificate:
        """Compare `compact` in its own precision with the outputs in float64, and return the completed certificate.

        Precision limits the masked network as well: what it is off by is the measure. Samples of which it gives
        infinity or NaN, where float64 does not, are left out.
        """
        dtypes = [p.dtype for p in self._own.parameters() if p.is_floating_point()]
        lowest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)
        if not self._wide or lowest is torch.float64:
            return found
        errors = {"masked": 0.0, "compact": 0.0}
        for example, outputs in self._expected:
            call, expected = example.to_model(self._own), by_sample(outputs, example)
            try:
                masked = by_sample(outputs_of(self._own, call), example)
            except Exception:
                return found  # no kernel of this device takes the dtype
            with state_kept(compact):
                got = by_sample(outputs_of(compact.eval(), call), example)
            finite = [compare([a], [b])[0] < math.inf for a, b in zip(expected, masked, strict=True)]
            if not any(finite):
                raise VerificationError(
                    f"a network must give finite outputs in its own precision. Got infinity or NaN in {lowest} on "
                    f"input {shapes_of(example)}, but not in float64. Look at its weights, or prune it "
                    "in a wider precision, such as model.float()."
                )
            for name, other in (("masked", masked), ("compact", got)):
                chosen = zip(*((a, b) for a, b, use in zip(expected, other, finite, strict=True) if use), strict=True)
                difference, scale = compare(*map(list, chosen))
                errors[name] = max(errors[name], difference / max(scale, 1e-30))
        bound = max(self._tolerance, ROUNDINGS * torch.finfo(lowest).eps, TIMES_MASKED * errors["masked"])
        if not errors["compact"] <= bound:
            raise VerificationError(
                f"a compact network in {lowest} must be as close to the outputs in float64 as the masked one, which is "
                f"{errors['masked']:.1e} of their scale off. Got {errors['compact']:.1e}: constants that fold into "
                f"biases need more precision, or are beyond its range. Nothing was changed; prune it in float32, "
                "model.float(), and keep the compact network there."
            )
        own = str(lowest).removeprefix("torch.")
        return replace(found, own_dtype=own, own_difference=errors["compact"], own_masked=errors["masked"])
