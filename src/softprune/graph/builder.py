"""Interface of operator rules to the graph, while it is built from the operators of a forward pass."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from softprune.graph.channels import (
    PAD,
    BinaryOp,
    ChannelGraph,
    ChannelSets,
    ChannelwiseOp,
    Evaluate,
    FreeParameter,
    IntArray,
    LayerCall,
    LayerOp,
    NormOp,
    OpaqueOp,
    UnprovenSize,
    Use,
    collapse,
)
from softprune.graph.modules import LAYERS, PLAIN_LAYERS, is_known_norm, layer_kind
from softprune.graph.reader import per_sample


class Opaque(Exception):
    """Raised by a rule for a use of an operator that it does not support. The channels around it are then frozen.

    The message continues a sentence that starts with the operator and its location, in the reason shown to users.
    """


@dataclass(frozen=True)
class Activation:
    """Properties of an activation f with f(0) = 0."""

    left_tail_dies: bool = False
    """Whether f(x) approaches 0 as x approaches minus infinity."""
    steepest_slope: float = 1.0
    """Maximum of |f'|, for activations with both tails alive."""
    dips: Callable[[float], float] | None = None
    """The function f, if it dips below zero before its left tail dies."""


@dataclass(frozen=True)
class Operator:
    """Entry of the operator table."""

    rule: Callable[[GraphBuilder, Node, Operator], Any]
    """Relates input and output channels: a function of the modules `operators` and `movements`."""
    at_zero: float = 0.0
    """Value at zero. If it is not zero, a dropped channel is not dead after the operator."""
    keeps_constants: bool = False
    """Whether a channel that is constant over space keeps its value."""
    transparent: bool = False
    """Whether it passes channels on, so that the activation of a BatchNorm may follow it."""
    activation: Activation | None = None
    by_values: bool = False
    """Whether its arguments determine if it is an activation, and which: bounds of clamp, the slope of LeakyReLU."""

    def activation_of(self, node: Node) -> str | None:
        """Return the name of the activation, or None. If it depends on arguments, it is identified by its values.

        If its slope exceeds 1, the slope is part of the name, as in ``"leaky_relu*2"``.
        """
        name = operator_name(node)
        if self.activation is None or not self.by_values:
            return name if self.activation is not None else None
        if len(node.all_input_nodes) > 1:  # bounds given by tensors
            return None
        args, kwargs = map_arg((node.args, node.kwargs), lambda _: _POINTS.clone())  # the operator may be in-place
        values = node.target(*args, **kwargs)  # type: ignore[operator]
        if not values[_POINTS <= 0].any():
            return "relu6" if values.equal(_POINTS.clamp(0, 6)) else "relu"
        if values[_POINTS == 0].any():
            return None
        slope = f"{(values / _POINTS).nan_to_num().abs().max():.3g}"
        return f"{name}*{slope}" if float(slope) > 1 else name


# On the CPU, regardless of the default device. The two smallest points show the slope at zero.
_POINTS = torch.tensor([*range(-8, 1), -(2.0**-10), 2.0**-10, *range(1, 9)], device="cpu", dtype=torch.float64)


def operator_name(node: Node) -> str:
    """Return the name of the node's operator in the table: ``aten::add_.Tensor`` -> ``add``."""
    if node.target is operator.getitem:
        return "getitem"
    schema = getattr(node.target, "_schema", None)
    return str(node.target) if schema is None else qualified(*schema.name.split("::"))


def qualified(space: str, name: str) -> str:
    """Return the name of an operator in the table: ``aten``, ``add_`` -> ``add``; ``mine``, ``f`` -> ``mine::f``."""
    name = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    return name if space == "aten" else f"{space}::{name}"


def argument(node: Node, index: int, default: Any = None) -> Any:
    """Return a positional argument of the node's operator, or its default, since PyTorch omits trailing defaults."""
    return node.args[index] if len(node.args) > index else default


@dataclass(frozen=True)
class Value:
    """A tensor of the graph: its shape, and an array of atoms that broadcasts to this shape."""

    shape: tuple[int, ...]
    atoms: IntArray

    @classmethod
    def with_channels(cls, shape: Sequence[int], dim: int, atoms: IntArray) -> Value:
        """Return a tensor with the channels `atoms` along `dim`. A single atom applies to all entries."""
        layout = [1] * len(shape)
        if len(atoms) != 1:
            layout[dim] = len(atoms)
        return cls(tuple(shape), atoms.reshape(layout))

    def along(self, dim: int) -> IntArray:
        """Return the atoms along `dim` as a vector; raise Opaque if they vary along another dimension."""
        if dim >= len(self.shape) or any(size > 1 for d, size in enumerate(self.atoms.shape) if d != dim):
            raise Opaque("reads them along another dimension")
        return np.broadcast_to(self.atoms.reshape(-1), (self.shape[dim],))

    def varies_along(self, dim: int) -> bool:
        """Return whether the atoms differ along `dim`."""
        return self.atoms.shape[dim] > 1


@dataclass
class GraphBuilder:
    """Builds a graph; provides the queries and records of operator rules."""

    model: nn.Module
    batch: int
    graph: ChannelGraph
    table: ChannelSets = field(default_factory=ChannelSets)
    called: dict[str, LayerOp | NormOp] = field(default_factory=dict)
    """Layers and BatchNorms of the graph, by name."""
    unknown: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Maps freezing reasons to (operator without a rule, location)."""
    sliced: set[Node] = field(default_factory=set)
    """Tensors whose slices have been related."""
    constant_outputs: dict[str, IntArray] = field(default_factory=dict)
    norm_nodes: dict[str, list[Node]] = field(default_factory=dict)
    values: dict[Node, Any] = field(default_factory=dict)
    """Maps nodes of the current pass to a Value or list of Values; parameters are mapped to their node."""
    training: bool = False
    """Whether the current pass is in training mode."""
    unread: set[Node] = field(default_factory=set)
    """Operators without an applicable rule."""
    asked: set[Any] = field(default_factory=set)
    """Inputs that the current rule has queried."""

    def __post_init__(self) -> None:
        self.modules = dict(self.model.named_modules())
        self.tensors: dict[str, Tensor] = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    # --- queries -----------------------------------------------------------------------------------------------

    def value(self, node: Any) -> Any:
        """Return the Value (or list of Values) of `node`. A parameter used this way becomes a free parameter."""
        self.asked.add(node)
        value = self.values.get(node)
        return self._free_parameter(value) if isinstance(value, Node) else value

    def tensor(self, node: Any) -> Value:
        """Return the Value of `node`; raise Opaque if it is not a tensor."""
        value = self.value(node) if isinstance(node, Node) else None
        if not isinstance(value, Value):
            raise Opaque("is used in an unusual way")
        return value

    def values_of(self, nodes: Iterable[Any]) -> list[Value]:
        """Return the Values of `nodes`, including those in lists."""
        leaves = pytree.tree_leaves([self.value(node) for node in nodes])
        return [leaf for leaf in leaves if isinstance(leaf, Value)]

    def differ_along(self, value: Value, dim: int) -> bool:
        """Return whether `dim` contains channels of different classes, unlike for example the paths of an SKNet."""
        classes = self.table.find(value.atoms)
        return bool((classes != classes.take([0], axis=dim)).any())

    def positions(self, count: int) -> int:
        """Return `count` positions per sample; 0 in the training pass, since costs are those of evaluation."""
        return 0 if self.training else per_sample(count, self.batch)

    def module_name(self, node: Node) -> str:
        """Return the name of the innermost module whose forward ran `node`."""
        calls = node.meta.get("calls")
        return calls[-1][1] if calls else ""

    def module_of(self, node: Node) -> nn.Module:
        """Return the innermost module whose forward ran `node`."""
        return self.modules[self.module_name(node)]

    def place(self, node: Node) -> str:
        """Return the location of `node` for a message."""
        name = self.module_name(node)
        return f"'{name}'" if name else "the model's forward"

    def reason(self, node: Node, what: object) -> str:
        """Return a freezing reason: the operator of `node`, its location, and `what` it does."""
        return f"{node.target} in {self.place(node)} {what}"

    # --- records -----------------------------------------------------------------------------------------------

    def pinned_value(self, shape: Sequence[int], reason: str) -> Value:
        """Return a tensor whose channels are never cut."""
        atom = self.table.fresh(1)
        self.table.pin(atom, reason)
        return Value.with_channels(shape, 0, atom)

    def constant_value(self, shape: Sequence[int], number: complex | None = None) -> Value:
        """Return a constant tensor of fixed shape, filled with `number` if that is known."""
        value = self.pinned_value(shape, "they are combined with a constant in forward()")
        self.graph.constants.append(value.atoms.ravel())
        if number is not None:
            self.graph.ops.append(
                ChannelwiseOp(np.full_like(value.atoms, PAD), value.atoms, lambda zeros: zeros + number)
            )
        return value

    def opaque(self, node: Node, reason: str) -> Any:
        """Freeze the inputs of `node` and return pinned Values for its outputs."""
        self.unread.add(node)
        reached = self.values_of(node.all_input_nodes)
        for value in reached:
            self.table.pin(value.atoms, reason)

        def freeze(example: Any) -> Any:
            if isinstance(example, Tensor):
                return self.mixed(example.shape, reason, [value.atoms for value in reached])
            return [freeze(item) for item in example] if isinstance(example, (list, tuple)) else None

        return freeze(node.meta["val"])

    def add_unproven_size(
        self, node: Node, atoms: IntArray, what: str = "fixes their number by a literal size"
    ) -> None:
        """Record that an explicit size in `node` may fix the number of channels `atoms`; `what` is the reason."""
        code = f"{type(self.module_of(node)).__name__}: {node.target} {what}"
        self.graph.unproven_sizes.append(UnprovenSize(atoms.ravel(), self.reason(node, what), code))

    def answer_for(self, node: Node) -> None:
        """Record that the rule handles all inputs of `node`."""
        self.asked.update(node.all_input_nodes)

    def fresh_value(self, node: Node, dim: int) -> Value:
        """Return the output of a parametric operator, with new atoms along `dim`."""
        shape = node.meta["val"].shape
        return Value.with_channels(shape, dim, self.table.fresh(shape[dim]))

    def mapped(
        self, atoms: IntArray, evaluate: Evaluate | None, keeps_zero: bool = True, activation: str | None = None
    ) -> IntArray:
        """Return new channels in the classes of `atoms`, each computed from its counterpart."""
        outputs = self.table.follow(atoms)
        self.graph.ops.append(ChannelwiseOp(atoms, outputs, evaluate, keeps_zero, activation))
        return outputs

    def channelwise(
        self,
        node: Node,
        value: Value,
        evaluate: Evaluate | None,
        keeps_zero: bool = True,
        activation: str | None = None,
    ) -> Any:
        """Return the output of a channelwise operator."""
        example = node.meta["val"]
        if isinstance(example, Tensor):
            return Value(tuple(example.shape), self.mapped(value.atoms, evaluate, keeps_zero, activation))
        output = Value(tuple(example[0].shape), self.mapped(value.atoms, evaluate, keeps_zero))
        # Indices of pooled values are not constant, even if the channel is.
        indices = self.mapped(value.atoms, None, keeps_zero=False)
        return [output, *(Value(tuple(each.shape), indices) for each in example[1:])]

    def mixed(self, shape: Sequence[int], reason: str, inputs: Sequence[IntArray]) -> Value:
        """Return a pinned Value that may depend on all of `inputs`."""
        output = self.pinned_value(shape, reason)
        self.graph.ops.append(OpaqueOp(tuple(atoms.ravel() for atoms in inputs), output.atoms.ravel()))
        return output

    def combined(
        self,
        node: Node,
        left: Value,
        right: Value,
        evaluate: Evaluate,
        *,
        absorbs_zero: bool = False,
        adds: bool = False,
    ) -> Value:
        """Combine two tensors of the same rank elementwise, with broadcasting."""
        outputs = self.bound(node, left, right)
        one, other = (atoms.ravel() for atoms in np.broadcast_arrays(left.atoms, right.atoms))
        self.graph.ops.append(BinaryOp(one, other, outputs.ravel(), evaluate, absorbs_zero, adds))
        return Value(tuple(node.meta["val"].shape), outputs)

    def merged(self, arrays: Sequence[IntArray]) -> IntArray:
        """Merge channels that alternate over space or batch to one class, which is constant only if all are equal."""
        found = arrays[0]
        for array in arrays[1:]:
            self.table.union(found, array)
            outputs = self.table.follow(found)
            self.graph.ops.append(BinaryOp(found.ravel(), array.ravel(), outputs.ravel(), equal, absorbs_zero=False))
            found = outputs
        return found

    def bound(self, node: Node, left: Value, right: Value) -> IntArray:
        """Tie the channels of two tensors that are combined in `node`, and return those of the result."""
        for one, other in ((left, right), (right, left)):
            for dim in filter(one.varies_along, range(len(one.shape))):
                if other.shape[dim] != 1 and not other.varies_along(dim) and self.differ_along(one, dim):
                    shape = np.broadcast_shapes(one.atoms.shape, other.atoms.shape)
                    self.table.union(one.atoms, np.broadcast_to(other.atoms, shape))
                elif other.shape[dim] == 1 and other.atoms.size == 1:
                    # A single channel that is broadcast over channels must not be removed.
                    self.table.pin(other.atoms, f"one of them is broadcast in {self.place(node)}")
        # Tie channels only if both operands have them, without broadcasting.
        if left.atoms.shape == right.atoms.shape:
            self.table.union(left.atoms, right.atoms)
            return self.table.follow(left.atoms)
        narrow, wide = sorted((left, right), key=lambda value: value.atoms.size)
        if narrow.atoms.size > 1:
            sizes = zip(narrow.atoms.shape, wide.atoms.shape, strict=True)
            if all(size in (1, wider) for size, wider in sizes):
                self.table.union(np.broadcast_to(narrow.atoms, wide.atoms.shape), wide.atoms)
            else:
                for value in (narrow, wide):
                    self.table.pin(value.atoms, "tensors with channels along different dimensions are combined")
        both = np.broadcast_arrays(left.atoms, right.atoms)
        return self.table.follow(both[0] if left.atoms.size >= right.atoms.size else both[1])

    def moved(self, node: Node, values: Sequence[Value], function: Callable[..., Any]) -> Any:
        """Run a data movement on the arrays of atoms, expanded to the shapes of the tensors without copying."""
        spread = [torch.from_numpy(value.atoms).expand(value.shape) for value in values]
        try:
            try:
                moved = function(*spread)
            except RuntimeError:  # views of expanded memory, or operators without an integer implementation
                moved = function(*[tensor.double().contiguous() for tensor in spread])
        except RuntimeError as error:
            raise Opaque("is used in an unusual way") from error

        def read(result: Any, example: Any) -> Any:
            if not isinstance(result, Tensor):
                return [read(*pair) for pair in zip(result, example, strict=True)]
            if result.shape != example.shape:  # the operator depends on the dtype of the tensor
                raise Opaque("is used in an unusual way")
            return Value(tuple(result.shape), collapse(result.numpy()).astype(np.int64))

        return read(moved, node.meta["val"])

    def add_layer(self, node: Node, weight: Node, bias: Node | None, use: Use, fresh: LayerOp) -> bool:
        """Record a convolution or linear layer; return False if its parameters are not those of its module."""
        module = self.modules[fresh.name]
        known = isinstance(module, LAYERS) and fresh.kind == layer_kind(module)
        if not known or not self._owns(node, weight, bias):
            return False
        record = self.called.setdefault(fresh.name, fresh)
        if not isinstance(record, LayerOp) or record.groups != fresh.groups:
            return False
        if record is fresh:
            self.graph.layers.append(record)
        record.padded |= fresh.padded
        # A subclass may compute something else in addition.
        record.replaceable = type(module) in PLAIN_LAYERS
        self._add_call(node, record, use, fresh.selectable)
        return True

    def add_norm(self, node: Node, weight: Node | None, bias: Node | None, use: Use) -> bool:
        """Record a BatchNorm or InstanceNorm; return False if its parameters are not those of a known module."""
        name = self.module_name(node)
        if not self._owns(node, weight, bias) or not is_known_norm(type(self.modules[name])):
            return False
        fresh = NormOp(name, selectable=True)
        record = self.called.setdefault(name, fresh)
        if record is fresh:
            self.graph.norms.append(fresh)
        self._add_call(node, record, use, selectable=True)
        self.norm_nodes.setdefault(name, []).append(node)
        return True

    # --- internal ----------------------------------------------------------------------------------------------

    def _owns(self, node: Node, weight: Node | None, bias: Node | None) -> bool:
        """Return whether both parameters are those of the module that ran `node`."""
        if weight is None:  # InstanceNorms usually have no parameters
            return True
        if "tensor" not in weight.meta or (bias is not None and "tensor" not in bias.meta):
            return False
        # Compare by identity, since a shared weight has the name of its first owner.
        module, tensor = self.module_of(node), self.tensors[weight.meta["tensor"]]
        shift = None if bias is None else self.tensors[bias.meta["tensor"]]
        own = (getattr(module, "weight", None), getattr(module, "running_mean", None))
        return any(tensor is mine for mine in own) and getattr(module, "bias", None) is shift

    def _add_call(self, node: Node, record: LayerOp | NormOp, use: Use, selectable: bool) -> None:
        """Add a call of a module. The channels of all calls are tied, and constraints of all calls apply."""
        record.uses.append(use)
        self.table.union(record.inputs, use.inputs)
        self.table.union(record.outputs, use.outputs)
        record.selectable &= selectable and not _reads_inside(node)
        self.graph.ops.append(LayerCall(record, use))
        self.answer_for(node)

    def _free_parameter(self, node: Node) -> Value:
        name = node.meta["tensor"]
        tensor = self.tensors[name]
        wide = [place for place, size in enumerate(tensor.shape) if size > 1]
        if name not in self.graph.free_parameters:
            atoms = self.table.fresh(tensor.shape[wide[0]] if len(wide) == 1 else 1)
            if len(wide) != 1:
                self.table.pin(atoms, f"they are combined with '{name}', whose shape is fixed")
            self.graph.free_parameters[name] = FreeParameter(name, wide[0] if len(wide) == 1 else -1, atoms)
        free = self.graph.free_parameters[name]
        return Value.with_channels(tensor.shape, free.dim, free.atoms)


def equal(left: Tensor, right: Tensor) -> Tensor:
    """Return the common values of two constants; NaN where they differ."""
    return torch.where(left == right, left, torch.nan)


def _reads_inside(node: Node) -> bool:
    """Return whether the input of the operator was computed in the same call of its module."""
    source, calls = node.args[0], node.meta["calls"]
    return bool(calls) and isinstance(source, Node) and calls[-1] in source.meta.get("calls", ())
