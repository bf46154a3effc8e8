"""Read a network: run it on tensors that have shapes but no data, and record its operators as a torch.fx graph.

The recorder runs above autograd, so it sees the operators that forward() calls. Composite operators are decomposed
(`DECOMPOSED`), so that they need no rule. `node.meta` contains:

* ``val``: the output, without data;
* ``calls``: the running module calls, innermost last, each with a key and the name of the module;
* ``returned``: the module calls that returned this tensor for a single tensor with the same batch and spatial size,
  each with the node of that input;
* ``tensor``: on placeholders, the name of the parameter or buffer;
* ``made``: on placeholders, whether forward() reads a tensor that is neither an input nor registered.
"""

from __future__ import annotations

import itertools
import operator
import os
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.utils import _pytree as pytree

from softprune.errors import ModelError, first_line
from softprune.log import get_logger
from softprune.module_state import attributes_kept, evaluating, first_uninitialised

# --- the call ---------------------------------------------------------------------------------------------------------

ExampleLike = Any
"""A tensor, a tuple of positional arguments, or ``(args, kwargs)`` with a tuple and a dict."""


ModuleCall = tuple[str, str]
"""(key of the call, name of the module)."""


def per_sample(count: int, batch: int) -> int:
    """Convert a count for a batch to a count per sample; a count not divisible by the batch size is unchanged."""
    return count // batch if count % batch == 0 else count


def first_floating(model: torch.nn.Module) -> Tensor | None:
    """Return the first floating-point parameter or buffer, to determine device and dtype of a network."""
    values = itertools.chain(model.parameters(), model.buffers())
    return next((tensor for tensor in values if tensor.is_floating_point()), None)


def leaves_of(output: Any) -> Iterator[Any]:
    """Yield the leaves in the output of a network, also inside dict-like objects and dataclasses."""
    for leaf in pytree.tree_leaves(output):
        if hasattr(leaf, "keys"):  # test first, since outputs of Hugging Face models are dataclasses too
            yield from leaves_of(dict(leaf))
        elif is_dataclass(leaf):
            yield from leaves_of([getattr(leaf, field.name, None) for field in fields(leaf)])
        else:
            yield leaf


@dataclass(frozen=True)
class Example:
    """A call of the model: ``model(*args, **kwargs)``."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, example: ExampleLike) -> Example:
        """Convert the argument ``example`` of a user."""
        if isinstance(example, Example):
            return example
        if isinstance(example, Tensor):
            return cls((example,), {})
        if isinstance(example, list):
            example = tuple(example)
        if not isinstance(example, tuple):
            raise ModelError(
                "`example` must be a tensor, a tuple of positional arguments, or (args, kwargs). "
                f"Got {type(example).__name__}. Pass the arguments of the model: torch.randn(2, 3, 32, 32), "
                "(image, mask), ((), {'pixel_values': image}) for keywords, or (batch,) where one argument is a dict."
            )
        if len(example) == 2 and isinstance(example[0], tuple) and isinstance(example[1], dict):
            return cls(example[0], dict(example[1]))
        return cls(example, {})

    def tensors(self) -> list[Tensor]:
        """Return all tensors in the arguments, including nested ones."""
        return [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    def map(self, function: Any) -> Example:
        """Return the same call with `function` applied to every tensor."""
        args, kwargs = pytree.tree_map_only(Tensor, function, (self.args, self.kwargs))
        return Example(args, kwargs)

    def to_model(self, model: torch.nn.Module) -> Example:
        """Return the same call with the device and floating-point dtype of `model`'s parameters (or buffers)."""
        like = first_floating(model)
        if like is None:
            return self

        def move(tensor: Tensor) -> Tensor:
            dtype = like.dtype if tensor.is_floating_point() else tensor.dtype
            return tensor.detach().to(like.device, dtype)

        return self.map(move)

    def batch_size(self) -> int | None:
        """Return the first dimension of all tensors; None if they differ or if no tensor has a second dimension."""
        tensors = self.tensors()
        sizes = {tensor.shape[0] if tensor.ndim else None for tensor in tensors}
        return sizes.pop() if len(sizes) == 1 and any(tensor.ndim > 1 for tensor in tensors) else None

    def first(self, count: int) -> Example:
        """Return the same call with at most `count` samples; unchanged if there is no batch dimension."""
        batch = self.batch_size()
        return self if batch is None or batch <= count else self.with_batch(count)

    def with_batch(self, size: int) -> Example:
        """Return the same call with batch size `size`, by repeating or dropping samples."""

        def resize(tensor: Tensor) -> Tensor:
            repeats = -(-size // max(tensor.shape[0], 1))
            return tensor.repeat(repeats, *(1,) * (tensor.ndim - 1))[:size]

        return self.map(resize)


# --- the passes -------------------------------------------------------------------------------------------------------

logger = get_logger(__name__)

aten = torch.ops.aten
PLAIN = (int, float, complex, bool, str, type(None))
"""Types that a network may return in addition to tensors."""
TORCH = os.path.dirname(torch.__file__)
"""Folder of PyTorch's code."""
PROCESS_WIDE = threading.RLock()
"""Lock for global state, such as modes and settings of PyTorch and warnings, while a network is read or tried."""
LARGEST_CONSTANT = 4096
"""Maximum number of elements of a constant whose values are tracked."""
ANALYSIS_BATCH = 13
"""Batch size of the analysis. Not 1, so that squeezing and broadcasting cannot hide the batch dimension, and a prime
that rarely divides other sizes, since counts that it divides are assumed to scale with the batch."""

# fmt: off
COMPOSITE = (
    "hstack", "vstack", "dstack", "row_stack", "column_stack", "concat", "concatenate", "multiply", "subtract",
    "divide", "true_divide", "movedim", "moveaxis", "swapaxes", "swapdims", "mT", "mH", "numpy_T", "matrix_H",
    "adjoint", "fliplr", "flipud", "tile", "type_as", "atleast_1d", "atleast_2d", "atleast_3d",
)
# fmt: on
"""Composite operators, which PyTorch itself can decompose."""
DECOMPOSED: dict[Any, Callable[..., Tensor]] = {
    overload: overload.decompose
    for name in COMPOSITE
    for packet in [getattr(aten, name)]
    for overload in (getattr(packet, each) for each in packet.overloads())
    if not overload._schema.is_mutable
} | {
    aten.channel_shuffle.default: lambda x, groups: x.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2),
    aten.glu.default: lambda x, dim=-1: (halves := x.chunk(2, dim))[0] * halves[1].sigmoid(),
    # The product ties the channels of both tensors.
    aten.view_as.default: lambda x, other: x.view(other.shape) * torch.ones_like(other, dtype=x.dtype),
    aten.reshape_as.default: lambda x, other: x.reshape(other.shape) * torch.ones_like(other, dtype=x.dtype),
    aten.expand_as.default: lambda x, other: x * torch.ones_like(other, dtype=x.dtype),
    aten.addcmul.default: lambda x, left, right, *, value=1: x + value * (left * right),
    aten.addcdiv.default: lambda x, left, right, *, value=1: x + value * (left / right),
}
"""Maps operators to equivalent functions of operators with rules."""


@dataclass(frozen=True, eq=False)
class ForwardPass:
    """The operators of a call of a network, in order."""

    nodes: list[Node]
    training: bool
    example: Example
    any_batch: bool
    """Whether the call was made with ANALYSIS_BATCH, so that the model accepts any batch size."""

    def tensors_read(self) -> set[str]:
        """Return the names of the parameters and buffers that operators read."""
        return {node.meta["tensor"] for node in self.nodes if "tensor" in node.meta and node.users}

    def parameters_unread(self, model: nn.Module) -> set[str]:
        """Return the names of the parameters that no operator reads under any of their names."""
        every = dict(model.named_parameters(remove_duplicate=False))
        used = {id(every[name]) for name in self.tensors_read() if name in every}
        return {name for name, parameter in model.named_parameters() if id(parameter) not in used}


def read_passes(model: nn.Module, example: ExampleLike) -> list[ForwardPass]:
    """Record the operators of `model` in eval mode, and also in training mode if that uses more parameters.

    Nothing is computed and the model is not changed. Networks with auxiliary training heads (GoogLeNet, Inception)
    have two passes, all others one.
    """
    _check_readable(model, Example.of(example))
    given = Example.of(example).to_model(model)
    attempts = [(given, False)]
    if given.batch_size() is not None:
        attempts.insert(0, (given.with_batch(ANALYSIS_BATCH), True))
    for attempt, any_batch in attempts:
        try:
            evaluation = ForwardPass(record(model, attempt, training=False), False, attempt, any_batch)
            break
        except Exception as error:
            failure = error
    else:
        raise _explained(model, given, failure) from failure
    passes = [evaluation]
    if evaluation.parameters_unread(model):
        try:
            training = ForwardPass(record(model, attempt, training=True), True, attempt, any_batch)
        except Exception as error:
            logger.info("the network can only be read in eval mode; in training mode: %s", error)
        else:
            if training.tensors_read() - evaluation.tensors_read():
                passes.append(training)
    return passes


def size_dependence(model: nn.Module, forward: ForwardPass) -> str:
    """Return the first operator that changes with the input size, with its location; empty if there is none.

    The network is read with all dimensions after the second doubled and halved, if it accepts these sizes.
    """

    def operators(nodes: list[Node]) -> list[tuple[str, str]]:
        calls = ((node, node.meta["calls"]) for node in nodes if "calls" in node.meta)
        return [(str(node.target), running[-1][1] if running else "") for node, running in calls]

    def resized(factor: float) -> Callable[[Tensor], Tensor]:
        def resize(tensor: Tensor) -> Tensor:
            sizes = [max(1, int(size * factor)) for size in tensor.shape[2:]]
            return tensor.new_empty([*tensor.shape[:2], *sizes]) if tensor.is_floating_point() else tensor

        return resize

    for factor in (2, 0.5):
        try:
            other = record(model, forward.example.map(resized(factor)))
        except Exception:
            continue  # the network does not accept this size
        pairs = itertools.zip_longest(operators(forward.nodes), operators(other), fillvalue=("nothing", ""))
        for (here, place), (there, _) in pairs:
            if here != there:
                return f"{here} in {repr(place) if place else 'forward()'} becomes {there}"
    return ""


def record(model: nn.Module, example: Example, *, training: bool = False) -> list[Node]:
    """Record the operators of a call. The model is not changed.

    Raise an exception if the forward pass cannot run without data, or returns anything but tensors.
    """
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with without_data(model, example) as (mode, fakes, call), warnings.catch_warnings():
        recorder = _Recorder(Constants(mode))
        for name, fake in fakes.items():
            recorder.add_input(fake, name.replace(".", "_")).meta["tensor"] = name
        for tensor in call.tensors():
            recorder.add_input(tensor, "input")
        warnings.simplefilter("ignore")
        model.train(training)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with (
                patch.object(fake_tensor.log, "disabled", True),  # PyTorch logs errors that it raises
                torch.no_grad(),
                mode,
                enable_python_dispatcher(),
                calls_noted(recorder.running, model, recorder.note_result),
                recorder,
            ):
                output = torch.func.functional_call(model, fakes, call.args, call.kwargs)
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
    return recorder.finish(output)


# --- tensors without data ---------------------------------------------------------------------------------------------


@contextmanager
def without_data(model: nn.Module, example: Example) -> Iterator[tuple[FakeTensorMode, dict[str, Tensor], Example]]:
    """Yield a FakeTensorMode, parameters and buffers by name, and a call without data. The model is not changed."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    named = (*model.named_parameters(), *model.named_buffers())
    fakes = {name: fake_like(mode, tensor) for name, tensor in named}
    call = example.map(lambda tensor: fake_like(mode, tensor))
    # Propagate constants of up to LARGEST_CONSTANT elements, also through writes; by default only single elements.
    known = patch.object(fake_tensor, "CONSTANT_NUMEL_LIMIT", LARGEST_CONSTANT)
    with PROCESS_WIDE, attributes_kept(model), torch.compiler.set_stance("force_eager"), known:
        yield mode, fakes, call


class Constants:
    """Tracks the values of tensors other than parameters, buffers and inputs, which forward() may read.

    Operators run on copies, so that no tensor of the model changes. For use inside :func:`without_data`.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._fakes: dict[int, tuple[Tensor, Tensor]] = {}
        """Maps ids to (tensor, fake tensor). Keeping the tensor alive keeps its id unique."""

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator inside the FakeTensorMode."""
        args, kwargs = pytree.tree_map_only(Tensor, self._fake, (args, kwargs))
        return func(*args, **kwargs)

    def _fake(self, tensor: Tensor) -> Tensor:
        if type(tensor) is not Tensor or tensor.numel() > LARGEST_CONSTANT or tensor.layout != torch.strided:
            return tensor
        if id(tensor) not in self._fakes:
            with unset_fake_temporarily():
                copy = tensor.detach().clone()
            fake = self._mode.fake_tensor_converter.from_real_tensor(self._mode, copy, make_constant=True)
            self._fakes[id(tensor)] = tensor, fake
        return self._fakes[id(tensor)][1]


def fake_like(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """Return a fake tensor like `tensor`, without data."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.is_quantized:
        return mode.from_tensor(tensor.detach())
    # Much faster than from_tensor.
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return FakeTensor(mode, empty, tensor.device)


@contextmanager
def calls_noted(
    running: list[ModuleCall], model: nn.Module, note: Callable[[ModuleCall, Tensor, Tensor], None] | None = None
) -> Iterator[None]:
    """Keep the running module calls in `running`, innermost last, and call `note` for calls that map a single tensor
    to a tensor."""
    handles, numbers = [], itertools.count(1)

    def entering(name: str) -> Callable[..., None]:
        return lambda module, args: running.append((f"{name}@{next(numbers)}", name))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        call = running.pop()
        if note is not None and len(args) == 1 and isinstance(args[0], Tensor) and isinstance(output, Tensor):
            note(call, args[0], output)

    try:
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(entering(name), prepend=True))
            handles.append(module.register_forward_hook(leave))
        yield
    finally:
        for handle in handles:
            handle.remove()


# --- the recorder -----------------------------------------------------------------------------------------------------


class _Recorder(ProxyTorchDispatchMode):
    """Appends every operator to a graph, above autograd, where composite operators are not yet decomposed."""

    # PyTorch allows only modes of this class above autograd. Nothing else of it is used.
    def __init__(self, constants: Constants) -> None:
        super().__init__(None, "fake", pre_dispatch=True)  # type: ignore[arg-type]
        self._known = constants
        self.graph = Graph()
        self._nodes: dict[int, tuple[Tensor, Node]] = {}
        """Maps ids to (tensor, last node that returned it). Keeping the tensor alive keeps its id unique."""
        self._shapes: list[tuple[Tensor, torch.Size]] = []
        self.running: list[ModuleCall] = []

    def add_input(self, tensor: Tensor, name: str) -> Node:
        """Add and return a placeholder for `tensor`."""
        node = self.graph.placeholder(name)
        node.meta["val"] = tensor
        self._nodes[id(tensor)] = tensor, node
        return node

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DECOMPOSED:
            with self:
                return DECOMPOSED[func](*args, **kwargs)
        if func is aten.lift_fresh.default:
            func = aten.lift_fresh_copy.default
        given, named = pytree.tree_map_only(Tensor, self._node, (args, kwargs))
        output = self._known.run(func, args, kwargs)
        if _holds_tensor(output):
            node = self.graph.call_function(func, given, named)
            node.meta.update(val=output, calls=tuple(self.running))
            self._track(output, node)
        elif func._schema.is_mutable:
            raise ModelError(f"softprune cannot record {func}, which returns no tensor.")
        return output

    def note_result(self, call: ModuleCall, given: Tensor, output: Tensor) -> None:
        """Record that `call` returned `output`, if it has the batch and spatial size of the input `given`."""
        (_, source), (_, node) = (self._nodes.get(id(each), (None, None)) for each in (given, output))
        if node is not None and (output.shape[:1], output.shape[2:]) == (given.shape[:1], given.shape[2:]):
            node.meta.setdefault("returned", []).append((call, source))

    def finish(self, output: Any) -> list[Node]:
        """Return all nodes; the last one is the output."""
        if any(tensor.shape != shape for tensor, shape in self._shapes):
            raise ModelError("softprune cannot record operators that change a tensor's shape in place.")
        leaves = list(leaves_of(output))
        other = sorted({type(leaf).__name__ for leaf in leaves if not isinstance(leaf, (Tensor, *PLAIN))})
        if other:
            raise ModelError(
                "a network must return tensors, alone or in tuples, lists, dicts or dataclasses. Got "
                f"{', '.join(other)}; wrap the network in a module that returns its tensors."
            )
        self.graph.output(tuple(self._node(leaf) for leaf in leaves if isinstance(leaf, Tensor)))
        for node in reversed(self.graph.nodes):
            if node.target is operator.getitem and not node.users:
                self.graph.erase_node(node)
        return list(self.graph.nodes)

    def _track(self, output: Any, node: Node) -> None:
        if isinstance(output, Tensor):
            self._nodes[id(output)] = output, node
            self._shapes.append((output, output.shape))
        elif isinstance(output, (list, tuple)):
            for position, item in enumerate(output):
                if _holds_tensor(item):
                    part = self.graph.call_function(operator.getitem, (node, position))
                    part.meta.update(val=item, calls=node.meta["calls"])
                    self._track(item, part)

    def _node(self, tensor: Tensor) -> Node:
        if id(tensor) not in self._nodes:
            twin = self._twin(tensor)
            if twin is not None:
                return self._nodes[id(twin)][1]
            self.add_input(tensor, "constant").meta["made"] = True
        return self._nodes[id(tensor)][1]

    def _twin(self, tensor: Tensor) -> Tensor | None:
        """Return the recorded tensor with the same storage, since PyTorch wraps the result of zeros_like again."""
        if not isinstance(tensor, FakeTensor):
            return None
        storage = tensor.untyped_storage()._cdata
        for other, shape in reversed(self._shapes):
            if shape == tensor.shape and other.untyped_storage()._cdata == storage:
                return other
        return None


def _holds_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))


# --- why a network cannot be read -------------------------------------------------------------------------------------


def _check_readable(model: nn.Module, given: Example) -> None:
    """Raise a ModelError for networks and examples that are known not to work."""
    missing = first_uninitialised(model)
    if missing is not None and missing[1] == "lazy":
        raise ModelError(f"parameters must have shapes. Got '{missing[0]}', a lazy one; run the model once first.")
    for name, module in model.named_modules():
        if hasattr(module, "fake_quant_enabled"):  # importing the class would cause a warning of PyTorch
            raise ModelError(
                f"a network prepared for quantisation-aware training cannot be pruned. Got {type(module).__name__} at "
                f"'{name}'; prune first, then prepare the compact network."
            )
    if given.batch_size() == 0 or (missing is None and any(tensor.is_meta for tensor in given.tensors())):
        raise ModelError(
            "`example` must contain at least one sample, with data. Got "
            f"{', '.join(f'{tuple(t.shape)} on {t.device}' for t in given.tensors())}; use torch.randn(2, ...)."
        )


def _explained(model: nn.Module, example: Example, failure: Exception) -> ModelError:
    """Return the error for a network that cannot be read, because of the example or of its forward()."""
    if isinstance(failure, ModelError):
        return ModelError(str(failure))
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in example.tensors())
    given = f"tensors of shape {shapes}" if shapes else f"no tensor among {example.args!r} and {example.kwargs!r}"
    rule, remedy = (
        "forward() must run on tensors that have shapes but no data, which is how softprune reads networks",
        "The usual cause is Python code in forward() that depends on values; prune the part without it (for detection "
        "models: model.backbone).",
    )
    try:
        with evaluating(model), torch.no_grad():
            model(*example.args, **example.kwargs)
    except Exception as error:
        rule, remedy, failure = "the model must accept `example`", "Pass an example that model(example) accepts.", error
    if _is_converted(model):
        remedy = "Exported, scripted and quantised networks cannot be pruned; pass the network that was converted."
    frames = traceback.extract_tb(failure.__traceback__)
    own = [frame for frame in frames if frame.name == "forward" and not frame.filename.startswith(TORCH)]
    place = f" at {own[-1].filename}:{own[-1].lineno}, `{own[-1].line}`" if own else ""
    return ModelError(
        f"{rule}. Got {given}, on which {type(model).__name__} raised{place}: {type(failure).__name__}: "
        f"{first_line(failure)}. {remedy}"
    )


def _is_converted(model: nn.Module) -> bool:
    """Return whether the network was exported, scripted or quantised, so that it cannot be cut."""
    # torch.export returns a GraphModule with its own train() and eval().
    exported = isinstance(model, torch.fx.GraphModule) and "eval" in model.__dict__
    return exported or any(
        isinstance(module, torch.jit.ScriptModule) or ".quantized." in type(module).__module__
        for module in model.modules()
    )
