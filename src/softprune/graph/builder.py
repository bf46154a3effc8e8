"""What the rules of operators read and write while the graph is built from the operators of a forward pass."""

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

from softprune.graph.channels import PAD, ChannelSets, IntArray, collapse
from softprune.graph.example import per_sample
from softprune.graph.modules import LAYERS, PLAIN_LAYERS, is_known_norm, layer_kind
from softprune.graph.ops import (
    ChannelwiseOp,
    EqualWidths,
    ExtraMacs,
    FreeParameter,
    LayerCall,
    LayerOp,
    NormOp,
    Op,
    OpaqueOp,
    UnprovenSize,
    Use,
)


class Opaque(Exception):
    """Raised by a rule where an operator does what the rule cannot relate: the channels around it are kept.

    The message says what the operator does, and follows its name and place in the reason that users read.
    """


@dataclass(frozen=True)
class Activation:
    """An activation f with f(0) = 0: which inputs it maps to (nearly) zero."""

    left_tail_dies: bool = False
    """Whether f(x) goes to 0 for x to minus infinity."""
    steepest_slope: float = 1.0
    """The largest |f'|, for activations whose both tails live."""
    dips: Callable[[float], float] | None = None
    """f itself, where it falls below zero before its left tail dies."""


@dataclass(frozen=True)
class Operator:
    """What softprune knows about one operator."""

    rule: Callable[[GraphBuilder, Node, Operator], Any]
    """How channels pass through it: a function of the modules `elementwise`, `layers` and `movements`."""
    at_zero: float = 0.0
    """The image of zero. Other than zero, a dropped channel would not be dead after it."""
    keeps_constants: bool = False
    """Whether a channel that is constant over space stays at this constant."""
    transparent: bool = False
    """Whether it hands channels on, so that a BatchNorm's activation may stand after it."""
    activation: Activation | None = None
    by_values: bool = False
    """Whether its arguments decide if it is an activation, and which: bounds of a clip, the slope of a LeakyReLU."""

    def activation_of(self, node: Node) -> str | None:
        """Return the activation that `node` is, or None. Where arguments decide, its values tell.

        Arguments that make it steeper than 1 are named, as ``"leaky_relu*2"``.
        """
        name = operator_name(node)
        if self.activation is None or not self.by_values:
            return name if self.activation is not None else None
        if len(node.all_input_nodes) > 1:  # a bound that is a tensor
            return None
        args, kwargs = map_arg((node.args, node.kwargs), lambda _: _POINTS.clone())  # it may write in place
        values = node.target(*args, **kwargs)  # type: ignore[operator]
        if not values[_POINTS <= 0].any():
            return "relu6" if values.equal(_POINTS.clamp(0, 6)) else "relu"
        if values[_POINTS == 0].any():
            return None
        slope = f"{(values / _POINTS).nan_to_num().abs().max():.3g}"
        return f"{name}*{slope}" if float(slope) > 1 else name


# On the CPU, whatever the default device is at the import. The slope at zero shows at the smallest two.
_POINTS = torch.tensor([*range(-8, 1), -(2.0**-10), 2.0**-10, *range(1, 9)], device="cpu", dtype=torch.float64)


def operator_name(node: Node) -> str:
    """Return the name in the table: ``aten::add_.Tensor`` -> ``add``, ``mine::add_`` -> ``mine::add``."""
    if node.target is operator.getitem:
        return "getitem"
    schema = getattr(node.target, "_schema", None)
    return str(node.target) if schema is None else qualified(*schema.name.split("::"))


def qualified(space: str, name: str) -> str:
    """Return the name of an operator in the table."""
    name = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    return name if space == "aten" else f"{space}::{name}"


def argument(node: Node, index: int, default: Any = None) -> Any:
    """Return the positional argument of the node's operator, or the default, which torch leaves out at the end."""
    return node.args[index] if len(node.args) > index else default


@dataclass(frozen=True)
class Value:
    """A tensor of the graph: its shape, and its atoms in an array that broadcasts to that shape."""

    shape: tuple[int, ...]
    atoms: IntArray

    @classmethod
    def with_channels(cls, shape: Sequence[int], dim: int, atoms: IntArray) -> Value:
        """Return a tensor that has the channels `atoms` along `dim`; one atom is that of all its entries."""
        layout = [1] * len(shape)
        if len(atoms) != 1:
            layout[dim] = len(atoms)
        return cls(tuple(shape), atoms.reshape(layout))

    def along(self, dim: int) -> IntArray:
        """Return the atoms along `dim` as a vector; raise Opaque where they also vary along another dimension."""
        if dim >= len(self.shape) or any(size > 1 for d, size in enumerate(self.atoms.shape) if d != dim):
            raise Opaque("reads them along another dimension")
        return np.broadcast_to(self.atoms.reshape(-1), (self.shape[dim],))

    def varies_along(self, dim: int) -> bool:
        """Return whether the atoms differ along `dim`."""
        return self.atoms.shape[dim] > 1


@dataclass
class GraphBuilder:
    """The graph so far, and what the rules may ask and record."""

    model: nn.Module
    batch: int
    zeros_follow: bool = False
    """Whether zeros beside a tensor of their shape are as wide as it after a cut, too, not by a literal size."""
    zeros_may_follow: bool = False
    """Whether there are such zeros."""
    table: ChannelSets = field(default_factory=ChannelSets)
    ops: list[Op] = field(default_factory=list)
    equal_widths: list[EqualWidths] = field(default_factory=list)
    extra_macs: list[ExtraMacs] = field(default_factory=list)
    free_parameters: dict[str, FreeParameter] = field(default_factory=dict)
    layers: dict[str, LayerOp] = field(default_factory=dict)
    norms: dict[str, NormOp] = field(default_factory=dict)
    outputs: list[IntArray] = field(default_factory=list)
    constants: list[IntArray] = field(default_factory=list)
    """Atoms of constants in forward(): no input reaches an output through them."""
    unproven_sizes: list[UnprovenSize] = field(default_factory=list)
    unknown: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Reason by which an operator without a rule freezes -> the operator, and where it stands."""
    sliced: set[Node] = field(default_factory=set)
    """Tensors whose slices are bound already."""
    constant_outputs: dict[str, IntArray] = field(default_factory=dict)
    slopes: list[tuple[str, IntArray]] = field(default_factory=list)
    """Parameters that are slopes of a PReLU, with the channels that it reads."""
    norm_nodes: dict[str, list[Node]] = field(default_factory=dict)
    shared_norms: set[str] = field(default_factory=set)
    """BatchNorms whose parameters another module has as well."""
    values: dict[Node, Any] = field(default_factory=dict)
    """Node of the pass at hand -> its Value, a list of Values, or the node itself for a parameter."""
    training: bool = False
    """Whether the pass at hand is that of training."""
    asked: set[Any] = field(default_factory=set)
    """Tensors that the current rule has asked about."""

    def __post_init__(self) -> None:
        self.modules = dict(self.model.named_modules())
        self.tensors: dict[str, Tensor] = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        self._owners: dict[int, str] = {}
        """id(parameter) of weights that are cut -> name of the record that cuts it."""

    # --- what rules ask ----------------------------------------------------------------------------------------

    def value(self, node: Any, dim: int | None = None) -> Any:
        """Return the Value (or list of Values) of `node`; a parameter becomes a free parameter on its first such use.

        `dim`: where such a parameter has its channels, if it has several dimensions.
        """
        self.asked.add(node)
        value = self.values.get(node)
        return self._free_parameter(value, dim) if isinstance(value, Node) else value

    def tensor(self, node: Any, dim: int | None = None) -> Value:
        """Return the Value of `node`; raise Opaque where it is no tensor."""
        value = self.value(node, dim) if isinstance(node, Node) else None
        if not isinstance(value, Value):
            raise Opaque("is used in an unusual way")
        return value

    def values_of(self, nodes: Iterable[Any]) -> list[Value]:
        """Return the Values of `nodes`, and those in their lists."""
        leaves = pytree.tree_leaves([self.value(node) for node in nodes])
        return [leaf for leaf in leaves if isinstance(leaf, Value)]

    def differ_along(self, value: Value, dim: int) -> bool:
        """Return whether channels that may be cut one without the other meet along `dim` (paths of an SKNet do not)."""
        classes = self.table.find(value.atoms)
        return bool((classes != classes.take([0], axis=dim)).any())

    def positions(self, count: int) -> int:
        """Return `count` output positions per sample; none in training, since costs are those of evaluation."""
        return 0 if self.training else per_sample(count, self.batch)

    def module_name(self, node: Node) -> str:
        """Return the name of the innermost module whose forward ran `node`."""
        calls = node.meta.get("calls")
        return calls[-1][1] if calls else ""

    def module_of(self, node: Node) -> nn.Module:
        """Return the innermost module whose forward ran `node`."""
        return self.modules[self.module_name(node)]

    def place(self, node: Node) -> str:
        """Return the place of `node` in words."""
        name = self.module_name(node)
        return f"'{name}'" if name else "the model's forward"

    def reason(self, node: Node, what: object) -> str:
        """Return a reason in words: the operator of `node`, its place, and what it does."""
        return f"{node.target} in {self.place(node)} {what}"

    # --- what rules say ----------------------------------------------------------------------------------------

    def pinned_value(self, shape: Sequence[int], reason: str) -> Value:
        """Return a tensor that keeps its width whatever is cut."""
        atom = self.table.fresh(1)
        self.table.pin(atom, reason)
        return Value.with_channels(shape, 0, atom)

    def constant_value(self, shape: Sequence[int], number: complex | None = None) -> Value:
        """Return a tensor that no input reaches, of a size of its own, with `number` everywhere, if that is known."""
        value = self.pinned_value(shape, "they are combined with a constant in forward()")
        self.constants.append(value.atoms.ravel())
        if number is not None:
            self.ops.append(ChannelwiseOp(np.full_like(value.atoms, PAD), value.atoms, lambda zeros: zeros + number))
        return value

    def opaque(self, node: Node, reason: str) -> Any:
        """Freeze what reaches `node`, and return what leaves it: pinned Values."""
        reached = self.values_of(node.all_input_nodes)
        for value in reached:
            self.table.pin(value.atoms, reason)

        def freeze(example: Any) -> Any:
            if isinstance(example, Tensor):
                left = self.pinned_value(example.shape, reason)
                self.ops.append(OpaqueOp(tuple(value.atoms.ravel() for value in reached), left.atoms.ravel()))
                return left
            return [freeze(item) for item in example] if isinstance(example, (list, tuple)) else None

        return freeze(node.meta["val"])

    def add_unproven_size(
        self, node: Node, atoms: IntArray, what: str = "fixes their number by a literal size"
    ) -> None:
        """Record that an explicit size in `node` may fix the number of these channels: `what` in words."""
        self.unproven_sizes.append(UnprovenSize(atoms.ravel(), self.reason(node, what), node.meta["line"]))

    def answer_for(self, node: Node) -> None:
        """Record that the rule knows what becomes of every tensor that `node` reads."""
        self.asked.update(node.all_input_nodes)

    def fresh_value(self, node: Node, dim: int) -> Value:
        """Return the output of a parametric operator: new atoms along `dim`."""
        shape = node.meta["val"].shape
        return Value.with_channels(shape, dim, self.table.fresh(shape[dim]))

    def followed_value(self, node: Node, atoms: IntArray) -> Value:
        """Return the output of a channel-wise operator: new atoms in the classes of `atoms`."""
        return Value(tuple(node.meta["val"].shape), self.table.follow(atoms))

    def moved(self, node: Node, values: Sequence[Value], function: Callable[..., Any]) -> Any:
        """Run a data movement on the atoms themselves, in the tensors' shapes but mostly without their memory."""
        spread = [torch.from_numpy(value.atoms).expand(value.shape) for value in values]
        try:
            try:
                moved = function(*spread)
            except RuntimeError:  # a view of repeated memory, or an operator that knows no integers
                moved = function(*[tensor.double().contiguous() for tensor in spread])
        except RuntimeError as error:
            raise Opaque("is used in an unusual way") from error

        def read(result: Any, example: Any) -> Any:
            if not isinstance(result, Tensor):
                return [read(*pair) for pair in zip(result, example, strict=True)]
            if result.shape != example.shape:  # it looks at the tensor's bytes
                raise Opaque("is used in an unusual way")
            return Value(tuple(result.shape), collapse(result.numpy()).astype(np.int64))

        return read(moved, node.meta["val"])

    def add_layer(self, node: Node, weight: Node, bias: Node | None, use: Use, build: Callable[[str], LayerOp]) -> bool:
        """Record a convolution or linear layer; False where its parameters are not one such module's own."""
        owner = self._owner(node, weight, bias)
        if owner is None or not isinstance(self.modules[owner[0]], LAYERS):
            return False
        name, called = owner
        fresh = build(name)
        if fresh.kind != layer_kind(self.modules[name]):
            return False  # a convolution's weight in a transposed one: its rows are the inputs there
        first = self._claim(weight, bias, name)
        use.module = name
        if fresh.groups > 1 and not called:
            for atoms in (use.inputs, use.outputs):
                self.table.pin(atoms, f"forward() calls '{name}' as a function, with its own number of groups")
        fresh.selectable = fresh.selectable and called and not _reads_inside(node)
        # What a subclass computes around the operator is unknown; called from outside, it may not be replaced.
        fresh.replaceable = called and type(self.modules[name]) in PLAIN_LAYERS
        self._add_call(node, self.layers.setdefault(first, fresh), fresh, use, bias)
        return True

    def add_norm(self, node: Node, weight: Node | None, bias: Node | None, use: Use) -> bool:
        """Record a BatchNorm or InstanceNorm; False where its parameters are not one known module's own."""
        owner = self._owner(node, weight, bias)
        if owner is None or not is_known_norm(type(self.modules[owner[0]])):
            return False
        name, called = owner
        first = self._claim(weight, bias, name)
        if first != name:
            self.shared_norms |= {name, first}
            if first in self.norms:
                for atoms in (self.norms[first].inputs, self.norms[first].outputs):
                    self.table.pin(atoms, f"the BatchNorms '{first}' and '{name}' share their parameters")
            return False
        use.module = name
        fresh = NormOp(name, selectable=called and not _reads_inside(node))
        self._add_call(node, self.norms.setdefault(name, fresh), fresh, use, bias)
        self.norm_nodes.setdefault(name, []).append(node)
        return True

    def claimant(self, name: str) -> LayerOp | NormOp | None:
        """Return the convolution, linear layer or BatchNorm that cuts the parameter `name`."""
        owner = self._owners.get(id(self.tensors[name]), "")
        return self.layers.get(owner) or self.norms.get(owner)

    # --- inside ------------------------------------------------------------------------------------------------

    def _owner(self, node: Node, weight: Node | None, bias: Node | None) -> tuple[str, bool] | None:
        """Return (module that holds both parameters, whether `node` ran in that module's own forward)."""
        if weight is None:  # an InstanceNorm mostly has no parameters
            return self.module_name(node), True
        if "tensor" not in weight.meta or (bias is not None and "tensor" not in bias.meta):
            return None
        tensor = self.tensors[weight.meta["tensor"]]
        shift = None if bias is None else self.tensors[bias.meta["tensor"]]
        # By identity: a tied weight is read under the name of its first owner.
        for owner, called in ((self.module_name(node), True), (weight.meta["tensor"].rpartition(".")[0], False)):
            module = self.modules[owner]
            own = (getattr(module, "weight", None), getattr(module, "running_mean", None))
            if any(tensor is mine for mine in own) and getattr(module, "bias", None) is shift:
                return owner, called
        return None

    def _claim(self, weight: Node | None, bias: Node | None, name: str) -> str:
        """Let module `name` cut these parameters, unless a module with the same weight does; return who does."""
        if weight is None:
            return name
        owner = self._owners.setdefault(id(self.tensors[weight.meta["tensor"]]), name)
        if bias is not None:
            self._owners.setdefault(id(self.tensors[bias.meta["tensor"]]), owner)
        return owner

    def _add_call(
        self, node: Node, record: LayerOp | NormOp, fresh: LayerOp | NormOp, use: Use, bias: Node | None
    ) -> None:
        """Add a call of `record`, which is `fresh` at its first call."""
        if record is not fresh:  # the same weights once more: channels go together, what one call forbids is forbidden
            self.table.union(record.inputs, use.inputs)
            self.table.union(record.outputs, use.outputs)
            record.selectable &= fresh.selectable
            if isinstance(record, LayerOp) and isinstance(fresh, LayerOp):
                record.padded |= fresh.padded
                record.replaceable &= fresh.replaceable
                if record.groups != fresh.groups:
                    for atoms in (record.inputs, record.outputs):
                        self.table.pin(atoms, f"the weight of '{record.name}' is used with different groups")
        record.uses.append(use)
        holder = None if bias is None else self.claimant(bias.meta["tensor"])
        if holder is not None:  # another layer or BatchNorm may have the same bias
            self.table.union(holder.outputs, use.outputs)
        self.ops.append(LayerCall(record, use))
        self.answer_for(node)

    def _free_parameter(self, node: Node, dim: int | None) -> Value:
        name = node.meta["tensor"]
        tensor = self.tensors[name]
        wide = [place for place, size in enumerate(tensor.shape) if size > 1] if dim is None else [dim]
        if name not in self.free_parameters:
            atoms = self.table.fresh(tensor.shape[wide[0]] if len(wide) == 1 else 1)
            if len(wide) != 1:
                self.table.pin(atoms, f"they are combined with '{name}', whose shape is fixed")
            self.free_parameters[name] = FreeParameter(name, wide[0] if len(wide) == 1 else -1, atoms)
        free = self.free_parameters[name]
        return Value.with_channels(tensor.shape, free.dim, free.atoms)


def _reads_inside(node: Node) -> bool:
    """Return whether the operator's input was computed within the same call of its module."""
    source, calls = node.args[0], node.meta["calls"]
    return bool(calls) and isinstance(source, Node) and calls[-1] in source.meta.get("calls", ())
