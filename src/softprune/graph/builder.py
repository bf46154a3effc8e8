"""What the rules of operators read and write while :mod:`softprune.graph.walk` passes over the captured operators."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import Node
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
from softprune.graph.provenance import Provenance


@dataclass(frozen=True)
class Value:
    """A tensor of the graph: its shape, and its atoms in an array that broadcasts to that shape."""

    shape: tuple[int, ...]
    atoms: IntArray

    @classmethod
    def with_channels(cls, shape: Sequence[int], dim: int, atoms: IntArray) -> "Value":
        """A tensor that has the channels `atoms` along `dim`; one atom is that of all its entries."""
        layout = [1] * len(shape)
        if len(atoms) != 1:
            layout[dim] = len(atoms)
        return cls(tuple(shape), atoms.reshape(layout))

    def along(self, dim: int) -> IntArray | None:
        """The atoms along `dim` as a vector; None where they also vary along another dimension."""
        if any(size > 1 for d, size in enumerate(self.atoms.shape) if d != dim):
            return None
        return np.broadcast_to(self.atoms.reshape(-1), (self.shape[dim],))

    def varies_along(self, dim: int) -> bool:
        return self.atoms.shape[dim] > 1


@dataclass
class GraphBuilder:
    """The state of the walk, and what the rules may record."""

    model: nn.Module
    batch: int
    zeros_follow: bool = False
    """Whether zeros beside a tensor of their shape are as wide as it after a cut, too, not by a literal size."""
    zeros_may_follow: bool = False
    """Whether there are such zeros."""
    provenance: Provenance = field(init=False)
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
    """Node of the capture at hand -> its value."""
    asked: set[Any] = field(default_factory=set)
    """Tensors that the current rule has asked about."""

    def __post_init__(self) -> None:
        self.provenance = Provenance(self.model)

    # --- what rules ask ----------------------------------------------------------------------------------------

    def value(self, node: Any, dim: int | None = None) -> Any:
        """The Value (or list of Values) of `node`; a parameter becomes a free parameter on its first such use.

        `dim`: where such a parameter has its channels, if it has several dimensions.
        """
        self.asked.add(node)
        value = self.values.get(node)
        if isinstance(value, Node):
            return self._free_parameter(value, dim)
        return value

    def values_of(self, nodes: Iterable[Any]) -> list[Value]:
        """The Values of `nodes`, and those in their lists."""
        leaves = pytree.tree_leaves([self.value(node) for node in nodes])
        return [leaf for leaf in leaves if isinstance(leaf, Value)]

    def positions(self, count: int) -> int:
        """`count` output positions per sample; none in a train-mode graph, since costs are those of evaluation."""
        assert self.provenance.capture is not None
        return 0 if self.provenance.capture.training else per_sample(count, self.batch)

    # --- what rules say ----------------------------------------------------------------------------------------

    def where(self, node: Node) -> str:
        """Return the place of `node` in words."""
        _, name = self.provenance.module_of(node)
        return f"'{name}'" if name else "the model's forward"

    def pinned_value(self, shape: Sequence[int], reason: str) -> Value:
        """A tensor that keeps its width whatever is cut."""
        atom = self.table.fresh(1)
        self.table.pin(atom, reason)
        return Value.with_channels(shape, 0, atom)

    def constant_value(self, shape: Sequence[int], number: complex | None = None) -> Value:
        """A tensor that no input reaches, of a size of its own, and `number` in every place, if that is known."""
        value = self.pinned_value(shape, "they are combined with a constant in forward()")
        self.constants.append(value.atoms.ravel())
        if number is not None:
            self.ops.append(ChannelwiseOp(np.full_like(value.atoms, PAD), value.atoms, lambda zeros: zeros + number))
        return value

    def opaque(self, node: Node, reason: str) -> Any:
        """Freeze what reaches `node`, and what leaves it."""
        reached = self.values_of(node.all_input_nodes)
        for value in reached:
            self.table.pin(value.atoms, reason)

        def freeze(example: Any) -> Any:
            if isinstance(example, Tensor):
                left = self.pinned_value(example.shape, reason)
                self.ops.append(OpaqueOp(tuple(value.atoms.ravel() for value in reached), left.atoms.ravel()))
                return left
            if isinstance(example, (list, tuple)):
                return [freeze(item) for item in example]
            return None

        return freeze(node.meta.get("val"))

    def unusual(self, node: Node) -> Any:
        """Freeze what is around an operator that is called in a way its rule does not foresee."""
        return self.opaque(node, f"{node.target} in {self.where(node)} is used in an unusual way")

    def add_unproven_size(
        self, node: Node, atoms: IntArray, effect: str = "fixes their number by a literal size"
    ) -> None:
        """An explicit size in `node` may fix the number of these channels, which `effect` says in words."""
        reason = f"{node.target} in {self.where(node)} {effect}"
        self.unproven_sizes.append(UnprovenSize(atoms.ravel(), reason, str(node.meta.get("stack_trace", reason))))

    def answer_for(self, node: Node) -> None:
        """The rule knows what becomes of every tensor that `node` reads, whether it asked about it or not."""
        self.asked.update(node.all_input_nodes)

    def fresh_value(self, node: Node, dim: int) -> Value:
        """The output of a parametric operator: new atoms along `dim`."""
        shape = node.meta["val"].shape
        return Value.with_channels(shape, dim, self.table.fresh(shape[dim]))

    def followed_value(self, node: Node, atoms: IntArray) -> Value:
        """The output of a channel-wise operator: new atoms in the classes of `atoms`."""
        return Value(tuple(node.meta["val"].shape), self.table.follow(atoms))

    def moved(self, function: Callable[..., Any], values: Sequence[Value]) -> Any:
        """Run a data movement on the atoms themselves, in the tensors' shapes but mostly without their memory."""
        spread = [torch.from_numpy(value.atoms).expand(value.shape) for value in values]
        try:
            moved = function(*spread)
        except RuntimeError:  # a view of repeated memory, or an operator that knows no integers
            moved = function(*[tensor.double().contiguous() for tensor in spread])

        def read(result: Any) -> Any:
            if isinstance(result, Tensor):
                return Value(tuple(result.shape), collapse(result.numpy()).astype(np.int64))
            return [read(item) for item in result]

        return read(moved)

    def add_layer(self, node: Node, weight: Node, bias: Node | None, build: Callable[[str], LayerOp], use: Use) -> bool:
        """Record a convolution or linear layer; False where its parameters are not one such module's own."""
        owner = self.provenance.owner(node, weight, bias)
        if owner is None or not isinstance(self.provenance.module(owner[0]), LAYERS):
            return False
        name, called = owner
        fresh = build(name)
        if fresh.kind != layer_kind(self.provenance.module(name)):
            return False  # a convolution's weight in a transposed one: its rows are the inputs there
        first = self.provenance.claim(weight, bias, name)
        use.module = name
        if fresh.groups > 1 and not called:
            for atoms in (use.inputs, use.outputs):
                self.table.pin(atoms, f"forward() calls '{name}' as a function, with its own number of groups")
        fresh.selectable = fresh.selectable and called and not self.provenance.reads_inside(node)
        # What a subclass computes around the operator is unknown; called from outside, it may not be replaced.
        fresh.replaceable = called and type(self.provenance.module(name)) in PLAIN_LAYERS
        self._add_call(node, self.layers.setdefault(first, fresh), fresh, use, bias)
        return True

    def add_norm(self, node: Node, weight: Any, bias: Node | None, use: Use) -> bool:
        """Record a BatchNorm or InstanceNorm; False where its parameters are not one known module's own."""
        owner = self.provenance.owner(node, weight, bias)
        if owner is None or not is_known_norm(type(self.provenance.module(owner[0]))):
            return False
        name, called = owner
        first = self.provenance.claim(weight, bias, name)
        if first != name:
            self.shared_norms |= {name, first}
            if first in self.norms:
                reason = f"the BatchNorms '{first}' and '{name}' share their parameters"
                self.table.pin(self.norms[first].inputs, reason)
                self.table.pin(self.norms[first].outputs, reason)
            return False
        use.module = name
        fresh = NormOp(name, selectable=called and not self.provenance.reads_inside(node))
        self._add_call(node, self.norms.setdefault(name, fresh), fresh, use, bias)
        self.norm_nodes.setdefault(name, []).append(node)
        return True

    def claimant(self, name: str) -> LayerOp | NormOp | None:
        """The convolution, linear layer or BatchNorm that cuts the parameter `name`."""
        owner = self.provenance.claimant(name)
        return self.layers.get(owner) or self.norms.get(owner)

    # --- inside ------------------------------------------------------------------------------------------------

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
        holder = None if bias is None else self.claimant(self.provenance.parameter_name(bias) or "")
        if holder is not None:  # another layer or BatchNorm may have the same bias
            self.table.union(holder.outputs, use.outputs)
        self.ops.append(LayerCall(record, use))
        self.answer_for(node)

    def _free_parameter(self, node: Node, dim: int | None) -> Value:
        name = self.provenance.parameter_name(node)
        assert name is not None
        tensor = self.provenance.tensor(name)
        wide = [place for place, size in enumerate(tensor.shape) if size > 1] if dim is None else [dim]
        if name not in self.free_parameters:
            atoms = self.table.fresh(tensor.shape[wide[0]] if len(wide) == 1 else 1)
            if len(wide) != 1:
                self.table.pin(atoms, f"they are combined with '{name}', whose shape is fixed")
            self.free_parameters[name] = FreeParameter(name, wide[0] if len(wide) == 1 else -1, atoms)
        free = self.free_parameters[name]
        return Value.with_channels(tensor.shape, free.dim, free.atoms)
