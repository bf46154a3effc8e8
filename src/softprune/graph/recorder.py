"""Record the operators of one forward pass as a torch.fx graph, on tensors that have shapes but no data.

torch.export gives the same operators, but is slower: it does much that an analysis does not need. It is the fallback
for networks that the recorder does not support; see :mod:`softprune.graph.capture`.
"""

from __future__ import annotations

import itertools
import operator
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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

from softprune.errors import ModelError
from softprune.graph.example import Example, leaves_of
from softprune.module_state import attributes_kept

aten = torch.ops.aten
PLAIN = (int, float, complex, bool, str, type(None))
"""What a network may return beside tensors."""
TORCH = os.path.dirname(torch.__file__)
"""The folder of torch's own code."""
PROCESS_WIDE = threading.RLock()
"""Held while a network is traced or tried: modes and settings of torch, and warnings, are of the whole process."""
LARGEST_CONSTANT = 4096
"""Elements of a constant whose values are known."""


def record(model: nn.Module, example: Example) -> tuple[list[Node], dict[str, str]]:
    """Return the operators of one call in the model's present mode, and placeholder -> name of its parameter or buffer.

    The model is left as it was. Raise an exception where the forward pass cannot run without data, stores tensors on
    modules, or returns what is no tensor.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = {name: fake_like(mode, tensor) for name, tensor in tensors.items()}
    call = example.map(lambda tensor: fake_like(mode, tensor))
    recorder = _Recorder(Constants(mode))
    parameters = {recorder.add_input(fake, name.replace(".", "_")): name for name, fake in fakes.items()}
    for tensor in call.tensors():
        recorder.add_input(tensor, "input")
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with (
            attributes_kept(model) as changed,
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
            values_known(),
            mode,
            enable_python_dispatcher(),
            calls_noted(recorder.running, model),
            recorder,
        ):
            output = torch.func.functional_call(model, fakes, call.args, call.kwargs)
            # Recurrent layers keep their weights in a list as well, made again in forward().
            kept = ("_flat_weights", "_flat_weight_refs")
            stored = [name for name, value in changed() if _holds_tensor(value) and not name.endswith(kept)]
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
    if stored:
        raise ModelError(f"forward() must not store tensors on modules. Got '{stored[0]}'.")
    nodes = recorder.finish(output)
    return nodes, {**parameters, **recorder.constants}


@contextmanager
def values_known() -> Iterator[None]:
    """Let FakeTensorMode compute with constants, writes into them included; by default, with single elements only."""
    with patch.object(fake_tensor, "CONSTANT_NUMEL_LIMIT", LARGEST_CONSTANT):
        yield


class Constants:
    """Knows the values of tensors that are no parameter, buffer or input, which forward() may read.

    Operators run on copies, so that no tensor of the model changes. Use inside :func:`values_known`.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._fakes: dict[int, tuple[Tensor, Tensor]] = {}
        """id -> a tensor, which stays alive so that its id stays its own, and the fake tensor that stands for it."""

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operator inside the FakeTensorMode."""
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
    """A tensor like `tensor` without data."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.is_quantized:
        return mode.from_tensor(tensor.detach())
    # from_tensor is much slower.
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return FakeTensor(mode, empty, tensor.device)


def _batch_norm(args: Sequence[Any]) -> Tensor | None:
    """The output of a batch normalisation; None where its arguments do not fit together.

    torch takes it apart into a dozen operators to learn its shape, which takes longer than all other layers.
    """
    given, *others = args[:5]
    fits = isinstance(given, FakeTensor) and given.ndim > 1 and given.is_floating_point() and given.is_contiguous()
    if not fits or any(other is not None and other.shape != given.shape[1:2] for other in others):
        return None
    return _another(given)


def _another(tensor: FakeTensor) -> FakeTensor:
    """A new tensor like a fake one."""
    with unset_fake_temporarily():
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return FakeTensor(tensor.fake_mode, empty, tensor.device)


def _signature(value: Any) -> Any:
    """What an operator's output depends on, beside data; None where it depends on the values of a constant."""
    if isinstance(value, FakeTensor):
        return None if value.constant is not None else (value.shape, value.stride(), value.dtype, value.device)
    if isinstance(value, (list, tuple)):
        parts = tuple(map(_signature, value))
        return None if None in parts else parts
    if isinstance(value, dict):
        return _signature((*value.items(),))
    return None if isinstance(value, Tensor) else (type(value), value)


def _holds_tensor(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))


@contextmanager
def calls_noted(running: list[tuple[str, str]], model: nn.Module) -> Iterator[None]:
    """Keep in `running` the modules that are running, the innermost last: a key of the call, and the name."""
    handles, numbers = [], itertools.count(1)

    def entering(name: str) -> Callable[..., None]:
        return lambda module, args: running.append((f"{name}@{next(numbers)}", name))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        running.pop()

    try:
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(entering(name), prepend=True))
            handles.append(module.register_forward_hook(leave))
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Recorder(ProxyTorchDispatchMode):
    """Appends every operator to a graph, above autograd: before composite operators are taken apart."""

    # torch admits only modes of this class above autograd; nothing of it is used beside its place.
    def __init__(self, constants: Constants) -> None:
        super().__init__(None, "fake", pre_dispatch=True)  # type: ignore[arg-type]
        self._known = constants
        self.graph = Graph()
        self.constants: dict[str, str] = {}
        """Placeholders of tensors that are no parameter, buffer or input."""
        self._nodes: dict[int, tuple[Tensor, Node]] = {}
        """id -> a tensor, which stays alive so that its id stays its own, and the node that gave it last."""
        self._shapes: list[tuple[Tensor, torch.Size]] = []
        self.running: list[tuple[str, str]] = []
        self._outputs: dict[tuple[Any, Any], FakeTensor | None] = {}
        """Operator and shapes of what it was given -> what it returned; None: its first argument. No views."""

    def add_input(self, tensor: Tensor, name: str) -> str:
        """Add a placeholder for `tensor` and return its name."""
        node = self.graph.placeholder(name)
        node.meta["val"] = tensor
        self._nodes[id(tensor)] = tensor, node
        return node.name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.lift_fresh.default:
            func = aten.lift_fresh_copy.default
        given, named = pytree.tree_map_only(Tensor, self._node, (args, kwargs))
        output = self._run(func, args, kwargs)
        leaves = [output] if isinstance(output, Tensor) else pytree.tree_leaves(output)
        if any(isinstance(leaf, Tensor) for leaf in leaves):
            self._add(func, given, named, output)
        elif func._schema.is_mutable:
            raise ModelError(f"softprune cannot record {func}, which returns nothing.")
        return output

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator; where it ran on tensors of these shapes before, only make its output."""
        if func is aten.batch_norm.default and not kwargs and (output := _batch_norm(args)) is not None:
            return output
        signature = None if torch.Tag.inplace_view in func.tags else _signature((args, kwargs))
        if (func, signature) in self._outputs:
            known = self._outputs[func, signature]
            return args[0] if known is None else _another(known)
        output = self._known.run(func, args, kwargs)
        if signature is not None and type(output) is FakeTensor and output.constant is None:
            given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            if given and output is args[0]:
                self._outputs[func, signature] = None
            elif all(each.untyped_storage()._cdata != output.untyped_storage()._cdata for each in given):
                self._outputs[func, signature] = _another(output)  # operators such as t_ change strides of `output`
        return output

    def finish(self, output: Any) -> list[Node]:
        """Return all nodes, the outputs' last."""
        if any(tensor.shape != shape for tensor, shape in self._shapes):
            raise ModelError("softprune cannot record operators that change a tensor's shape in place.")
        leaves = list(leaves_of(output))
        if not all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in leaves):
            raise ModelError("softprune cannot record networks that return other objects than tensors.")
        self.graph.output(tuple(self._node(leaf) for leaf in leaves if isinstance(leaf, Tensor)))
        for node in reversed(self.graph.nodes):
            if node.target is operator.getitem and not node.users:
                self.graph.erase_node(node)
        return list(self.graph.nodes)

    def _add(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        node = self.graph.call_function(func, args, kwargs)
        node.meta.update(val=output, nn_module_stack=self._stack(), stack_trace=_source_lines())
        self._track(output, node)

    def _track(self, output: Any, node: Node) -> None:
        if isinstance(output, Tensor):
            self._nodes[id(output)] = output, node
            self._shapes.append((output, output.shape))
        elif isinstance(output, (list, tuple)):
            for position, item in enumerate(output):
                if _holds_tensor(item):
                    part = self.graph.call_function(operator.getitem, (node, position))
                    part.meta.update(val=item, nn_module_stack=self._stack())
                    self._track(item, part)

    def _node(self, tensor: Tensor) -> Node:
        if id(tensor) not in self._nodes:
            twin = self._twin(tensor)
            if twin is not None:
                return self._nodes[id(twin)][1]
            name = self.add_input(tensor, "constant")
            self.constants[name] = name
        return self._nodes[id(tensor)][1]

    def _twin(self, tensor: Tensor) -> Tensor | None:
        """Return the recorded tensor that `tensor` is a second object of: torch wraps what zeros_like gives again."""
        if not isinstance(tensor, FakeTensor):
            return None
        storage = tensor.untyped_storage()._cdata
        for other, shape in reversed(self._shapes):
            if shape == tensor.shape and other.untyped_storage()._cdata == storage:
                return other
        return None

    def _stack(self) -> dict[str, tuple[str, str]]:
        return {call: (name, "") for call, name in self.running}


def _source_lines() -> str:
    """Return the lines outside torch that lead to the operator, innermost first."""
    lines = []
    frame = sys._getframe(3)
    while frame is not None and frame.f_code is not record.__code__:
        name = frame.f_code.co_filename
        if not name.startswith(TORCH):
            lines.append(f"{name}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return "\n".join(lines)
