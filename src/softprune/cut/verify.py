"""Verify a cut: compare compact and masked network in float64 and in their own precision."""

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
"""Scales of the samples of a random input, in turn: a wrong cut may be exact for inputs of a single scale."""
BESIDE_EXAMPLE = (30.0, 0.1, 1.0)
"""Scales of random samples that are compared in addition to the example, which has its own scale."""


def random_inputs(example: Example, seed: int) -> Iterator[Example]:
    """Yield random inputs of another batch size, in order of preference: smaller, larger, and the size of `example`.

    The last one also has the batch size of `example`, for networks with a fixed batch size.
    """
    batch = example.batch_size()
    base = example if batch is None else example.with_batch(2 if batch != 2 else 3)
    for resize in (smallest, larger, None):
        yield noise(base, seed, resize, BESIDE_EXAMPLE)
    if batch is not None:
        yield noise(example, seed, scales=BESIDE_EXAMPLE)


def noise(example: Example, seed: int, resize: Resize | None = None, scales: Sequence[float] = SCALES) -> Example:
    """Replace the floating-point tensors of `example` by random numbers; samples have the `scales` in turn.

    Scalar tensors, such as a temperature, are kept. `resize` maps each spatial size to a new one. Volumes are never
    enlarged, since their cost grows with the cube of the size.
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
    """Format the shapes of the inputs for a message."""
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
    """Use one CPU thread. With more, each of many small operations waits for the slowest thread, which takes up to a
    hundred times longer on a busy machine."""
    # Not concurrently: another thread would find the number 1 and restore it.
    with PROCESS_WIDE:
        found = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(found)


# --- outputs ----------------------------------------------------------------------------------------------------------


def outputs_of(model: nn.Module, example: Example) -> list[Tensor]:
    """Call `model` on a copy of `example` and return copies of all output tensors."""
    call = example.map(torch.clone)
    with torch.no_grad():
        output = model(*call.args, **call.kwargs)
    # Outputs may be buffers that the next call overwrites.
    return [leaf.clone() for leaf in leaves_of(output) if isinstance(leaf, Tensor)]


def are_finite(outputs: Iterable[Tensor]) -> bool:
    """Return whether any output value is finite. Otherwise, a comparison would be meaningless."""
    return any(bool(output.isfinite().any()) for output in outputs)


def first_taken(attempts: Iterable[tuple[nn.Module, Example]]) -> tuple[nn.Module, Example, list[Tensor]]:
    """Return the first pair of network and input that runs and has finite outputs, together with the outputs."""
    for model, example in attempts:
        try:
            outputs = outputs_of(model, example.to_model(model))
        except Exception as error:  # the network may not accept this size or dtype
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
    """Split outputs with a batch dimension into samples, so that :func:`compare` uses the scale of each sample."""
    batch = example.batch_size()
    pieces: list[Tensor] = []
    for output in outputs:
        pieces += output.unbind(0) if output.ndim > 1 and output.shape[0] == batch else [output]
    return pieces


def outputs_and_foreign(model: nn.Module, example: Example, *originals: nn.Module) -> tuple[list[Tensor], list[str]]:
    """Return the outputs of `model`, and the names of the parameters of `originals` that the call reads.

    A deep copy shares functions with the original. If such a function references modules, the copy computes with the
    modules of the original.
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
    """Records the storage of every tensor that an operator reads."""

    def __init__(self) -> None:
        super().__init__()
        self.pointers: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._note((args, *kwargs.values()))
        return func(*args, **kwargs)

    def _note(self, values: Sequence[Any]) -> None:
        for value in values:  # operators take only tensors and lists of tensors, so pytree is not needed
            if isinstance(value, Tensor):
                if value.layout == torch.strided:
                    self.pointers.add(value.untyped_storage().data_ptr())
            elif isinstance(value, (list, tuple)):
                self._note(value)


FAINT = 1e-5
"""Minimum scale of an output, as a share of the scale of the largest output."""


def compare(expected: Sequence[Tensor], got: Sequence[Tensor]) -> tuple[float, float]:
    """Return (difference, scale) of the output with the largest difference relative to its own scale.

    The difference is infinite if the number of outputs, their shapes, or the positions of infinities and NaNs differ.
    """
    if len(expected) != len(got) or any(a.shape != b.shape for a, b in zip(expected, got, strict=True)):
        return math.inf, 1.0
    pairs = [_difference(a.double(), b.double()) for a, b in zip(expected, got, strict=True) if a.numel()]
    if not pairs:
        return 0.0, 0.0
    # An output that is nearly zero by cancellation has the rounding errors of larger values.
    least = FAINT * max(scale for _, scale in pairs)
    return worst_of((difference, max(scale, least)) for difference, scale in pairs)


def worst_of(pairs: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Return the (difference, scale) with the largest difference relative to its scale."""
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
"""Maximum difference in float64, relative to the largest output."""
OWN_TOLERANCE = 1e-5
"""The same for networks that only run in their own dtype."""
CONSTANT = 1e-9
"""Outputs for different samples count as equal if they differ by less than this, relative to the largest."""
ROUNDINGS, TIMES_MASKED = 8, 8
"""In its own precision, the error of a compact network may be this many rounding units, or this multiple of the error
of the masked network in the same precision."""


@dataclass(frozen=True)
class Comparison:
    """The largest difference between the outputs of two networks or runtimes."""

    max_difference: float
    """Difference of the output that differs most relative to its scale, over all inputs."""
    scale: float
    """Largest value of that output."""
    inputs: tuple[str, ...]
    """Shapes of the inputs."""


@dataclass(frozen=True)
class Certificate(Comparison):
    """Result of the comparison of a masked and a compact network."""

    tolerance: float = TOLERANCE
    dtype: str = "float64"
    own_dtype: str | None = None
    """The network's own dtype; None if it is `dtype`, or if the masked network does not run in it."""
    own_difference: float | None = None
    """Largest difference of the compact network in its own dtype from the float64 outputs, relative to their scale."""
    own_masked: float | None = None
    """The same for the masked network: the error due to the precision alone."""
    varies: bool = True
    """Whether the outputs differ between random samples; True if the network does not accept a batch of them."""

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
    """Compare two networks in eval mode; raise a VerificationError if their outputs differ.

    They are compared in float64, on `example` and on random inputs of another size and batch size, with samples of
    several scales. Then the compact network in its own precision is compared with the outputs in float64. If forward()
    only runs in its own dtype, they are compared in that dtype, with `OWN_TOLERANCE`. Neither network is changed.
    """
    for network in (masked, compact):
        check_is_module(network)
    proof = _Proof(duplicated(masked, share=True), duplicated(masked), example, tolerance, seed)
    found = proof.compare(proof.widened(duplicated(compact)), (masked, compact))
    return proof.compare_rounded(duplicated(compact, share=True), found)


def cut_and_verify(
    plan: PrunePlan, network: nn.Module, masks: Mapping[str, Tensor], example: ExampleLike
) -> tuple[nn.Module, Certificate]:
    """Cut `network` by `plan`; return the compact network and the certificate of its equality under hard `masks`."""
    plan.check_fits(network)

    def change_(compact: nn.Module) -> None:
        plan.check_fits(compact)  # a custom __deepcopy__ may have built a different network
        cut_(plan, compact)

    # The mask of a site applies to all of its BatchNorms.
    return changed_and_verified(network, change_, example, {**plan.masks(), **masks})


@one_thread()
def changed_and_verified(
    network: nn.Module, change_: Callable[[nn.Module], None], example: ExampleLike, masks: Mapping[str, Tensor]
) -> tuple[nn.Module, Certificate]:
    """Apply `change_` to a copy of `network`; return it with the certificate that it equals `network` with `masks`.

    The copy is changed in float64, where folding constants is exact, and compared. Then it is converted to the dtypes
    of the network, compared again, and returned.
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
    """Convert the floating-point tensors of `compact`, which was cut in float64, to the dtypes of `network`.

    Tensors added by the cut (biases, constant outputs of layers and branches) get the dtype of the weights there.
    """
    named = (network.named_parameters(remove_duplicate=False), network.named_buffers(remove_duplicate=False))
    dtypes = {name: tensor.dtype for tensors in named for name, tensor in tensors}

    def own(path: str, name: str, tensor: Tensor) -> Tensor:
        while path and not any(each.startswith(f"{path}.") for each in dtypes):
            path = path.rpartition(".")[0]  # a module that replaces a branch
        prefix = f"{path}." if path else ""
        inside = (dtype for each, dtype in dtypes.items() if each.startswith(prefix) and dtype.is_floating_point)
        dtype = dtypes.get(prefix + name) or dtypes.get(f"{prefix}weight") or next(inside, tensor.dtype)
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    for path, module in compact.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                parameter.data = own(path, name, parameter.data)  # keeps parameters shared between modules
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = own(path, name, buffer)


def _differ(tensors: Iterable[Tensor], batch: int | None) -> list[bool]:
    """Return for each floating-point tensor with a batch dimension whether its samples differ."""
    samples = [each for each in tensors if each.is_floating_point() and each.numel() and each.ndim and batch != 1]
    samples = [each for each in samples if len(each) == batch]
    return [bool((each - each[:1]).abs().max() > CONSTANT * each.abs().max()) for each in samples]


class _Proof:
    """Reference outputs of a masked network, in float64 or, if it only runs in its own dtype, in that.

    Args:
        own: A copy of the masked network, which is only called.
        reference: Another copy, which is converted to float64.
        example: An input of the network.
        tolerance: Maximum difference, relative to the largest output.
        seed: Seed of the random inputs.
    """

    def __init__(self, own: nn.Module, reference: nn.Module, example: ExampleLike, tolerance: float, seed: int) -> None:
        self._own = own.eval()
        # Convert inputs to the own precision first, so that both precisions get the same values.
        given = Example.of(example).to_model(own)
        # Two samples are sufficient, but some networks require the batch size of the example.
        networks, inputs = (reference.double().eval(), self._own), (given.first(2), given)
        network, taken, outputs = first_taken((each, attempt) for each in networks for attempt in inputs)
        self._expected = [(taken, outputs)]
        with suppress(ModelError):  # the network accepts no other input
            self._expected.append(first_taken((network, drawn) for drawn in random_inputs(taken, seed))[1:])
        self._wide = network is reference
        self._tolerance = tolerance if self._wide else max(tolerance, OWN_TOLERANCE)

    def widened(self, copy: nn.Module) -> nn.Module:
        """Convert a copy of the network to the dtype of the comparison, and return it."""
        return copy.double() if self._wide else copy

    def compare(self, compact: nn.Module, originals: Sequence[nn.Module]) -> Certificate:
        """Compare `compact` with the masked network, and check that it reads no parameters of `originals`."""
        found = []
        for example, expected in self._expected:
            shape = shapes_of(example)
            try:
                with state_kept(compact):
                    got, foreign = outputs_and_foreign(compact.eval(), example.to_model(compact), *originals)
            except Exception as error:
                raise VerificationError(
                    f"a compact network must run on all inputs of the masked one. Got {type(error).__name__} on input "
                    f"{shape}: {error}. Nothing was changed; please report the network."
                ) from error
            if foreign:
                raise VerificationError(
                    "a compact network must compute with its own parameters. Got one that reads "
                    f"{few_of('', foreign)} of the original: a function in its forward() references the original "
                    "modules, such as `model.forward = lambda x: ...`. Nothing was changed; write it as a method of a "
                    "module."
                )
            difference, size = compare(by_sample(expected, example), by_sample(got, example))
            if not difference <= self._tolerance * size:
                raise VerificationError(
                    f"a compact network must equal the masked one within {self._tolerance:g} of its output. Got a "
                    f"difference of {difference:.3g} at output scale {size:.3g} on input {shape}. "
                    "Nothing was changed; please report the network."
                )
            found.append((difference, size))
        dtype = next((p.dtype for p in compact.parameters()), torch.float64)
        shapes = tuple(shapes_of(example) for example, _ in self._expected)
        made = Certificate(*worst_of(found), shapes, self._tolerance, str(dtype).removeprefix("torch."))
        return replace(made, varies=self._varies())

    def _varies(self) -> bool:
        """Return whether the outputs depend on the input, as far as samples that differ show it."""
        told = []
        for example, outputs in self._expected:
            results = _differ(outputs, example.batch_size())
            if results and any(_differ(example.tensors(), example.batch_size())):
                told.append(any(results))
        return all(told)

    def compare_rounded(self, compact: nn.Module, found: Certificate) -> Certificate:
        """Compare `compact` in its own precision with the outputs in float64, and return the completed certificate.

        The tolerance depends on the error of the masked network in the same precision. Samples for which the masked
        network gives infinity or NaN in this precision, but not in float64, are left out.
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
                return found  # the device has no kernels for this dtype
            with state_kept(compact):
                got = by_sample(outputs_of(compact.eval(), call), example)
            finite = [compare([a], [b])[0] < math.inf for a, b in zip(expected, masked, strict=True)]
            if not any(finite):
                raise VerificationError(
                    f"a network must give finite outputs in its own precision. Got infinity or NaN in {lowest} on "
                    f"input {shapes_of(example)}, but not in float64. Check its weights, or prune it in a higher "
                    "precision, such as model.float()."
                )
            for name, other in (("masked", masked), ("compact", got)):
                chosen = zip(*((a, b) for a, b, use in zip(expected, other, finite, strict=True) if use), strict=True)
                difference, scale = compare(*map(list, chosen))
                errors[name] = max(errors[name], difference / max(scale, 1e-30))
        bound = max(self._tolerance, ROUNDINGS * torch.finfo(lowest).eps, TIMES_MASKED * errors["masked"])
        if not errors["compact"] <= bound:
            raise VerificationError(
                f"a compact network in {lowest} must be as close to the outputs in float64 as the masked one, whose "
                f"error is {errors['masked']:.1e} of their scale. Got {errors['compact']:.1e}: constants folded into "
                f"biases exceed its precision or range. Nothing was changed; prune and keep the network in float32, "
                "model.float()."
            )
        own = str(lowest).removeprefix("torch.")
        return replace(found, own_dtype=own, own_difference=errors["compact"], own_masked=errors["masked"])
