"""Walk the captured operators in order and relate their channels: the builder that the operator rules write to."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import Node

from softprune.graph.aliasing import Aliases
from softprune.graph.batchnorms import is_known_batch_norm
from softprune.graph.channels import ChannelSets, IntArray, collapse
from softprune.graph.example import per_sample
from softprune.graph.exported import Capture
from softprune.graph.inserted import ConstantOutput
from softprune.graph.ops import (
    ConstantOp,
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

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Value:
    """A tensor of the graph: its shape, and its atoms in an array that broadcasts to that shape."""

    shape: tuple[int, ...]
    atoms: IntArray

    def along(self, dim: int) -> IntArray | None:
        """The atoms along `dim` as a vector; None where they also vary along another dimension."""
        if any(size > 1 for d, size in enumerate(self.atoms.shape) if d != dim):
            return None
        return np.broadcast_to(self.atoms.reshape(-1), (self.shape[dim],))

    def varies_along(self, dim: int) -> bool:
        return self.atoms.shape[dim] > 1


Rule = Callable[["GraphBuilder", Node], Any]
LAYERS = (nn.modules.conv._ConvNd, nn.Linear)
"""Modules whose `weight` and `bias` we know how to cut; what subclasses do with them is proved by the trial cut."""
# fmt: off
PLAIN_LAYERS = frozenset([
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear,
])
# fmt: on
"""Modules whose whole forward is known, so that they may be given a bias or replaced."""

RULES: dict[str, Rule] = {}
"""Operator name without overload and in-place underscore -> how channels pass through it."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operators by name."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def operator_name(node: Node) -> str:
    """``aten::add_.Tensor`` -> ``add``."""
    if node.target is operator.getitem:
        return "getitem"
    schema = getattr(node.target, "_schema", None)
    name = schema.name.split("::")[-1] if schema is not None else str(node.target)
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def argument(node: Node, index: int, name: str, default: Any = None) -> Any:
    """An argument of the node's operator, given by position or by name."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


@dataclass
class GraphBuilder:
    """The state of the walk, and what the rules may say."""

    model: nn.Module
    batch: int
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
    unknown: dict[str, str] = field(default_factory=dict)
    """Operators without a rule -> one place where they stand."""
    sliced: set[Node] = field(default_factory=set)
    """Tensors whose slices are bound already."""
    constant_outputs: dict[str, IntArray] = field(default_factory=dict)
    norm_nodes: dict[str, list[Node]] = field(default_factory=dict)
    shared_norms: set[str] = field(default_factory=set)
    """BatchNorms whose parameters another module has as well."""
    _values: dict[Node, Any] = field(default_factory=dict)
    _capture: Capture | None = None
    _owned: dict[int, str] = field(default_factory=dict)
    """id(parameter) of cut weights -> name of the record that cuts it."""
    _names: dict[int, str] = field(default_factory=dict)
    """id(module) -> its first name."""
    _asked: set[Any] = field(default_factory=set)
    """Tensors that the rule at work has asked about."""

    # --- walking -----------------------------------------------------------------------------------------------

    def walk(self, capture: Capture) -> None:
        """Relate the channels of one captured forward pass."""
        self._capture = capture
        self._values = {}
        aliases = Aliases(capture.nodes)
        for node in capture.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "output":
                self._output(node)
            elif node.op == "call_function":
                self._values[node] = self._call(node)
            else:
                self._values[node] = self.opaque(node, f"'{node.op}' nodes have no rule")
            for stale in aliases.changed_by(node):
                self._overwritten(stale, node)

    def _overwritten(self, stale: Node, writer: Node) -> None:
        """`writer` wrote into the memory of `stale`, which is read again: what it holds then has no rule."""
        value = self._values.get(stale)
        if isinstance(value, Value):
            reason = f"{writer.target} in {self.where(writer)} overwrites a part of them"
            self.table.pin(value.atoms, reason)
            self._values[stale] = self._pinned_copy(value, reason)

    def _pinned_copy(self, value: Value, reason: str) -> Value:
        atom = self.table.fresh(1)
        self.table.pin(atom, reason)
        self.ops.append(OpaqueOp((value.atoms.ravel(),), atom))
        return Value(value.shape, atom.reshape((1,) * len(value.shape)))

    def _placeholder(self, node: Node) -> None:
        assert self._capture is not None
        example = node.meta.get("val")
        if not isinstance(example, Tensor):
            self._values[node] = None
            return
        name = self.parameter_name(node)
        if name is None:
            self._values[node] = self.pinned_value(
                example, f"they are combined with the model's input '{node.name}'"
            )
        elif not self.has_tensor(name):
            self._values[node] = self.pinned_value(example, "they are combined with a constant in forward()")
            self.constants.append(self._values[node].atoms.ravel())
        else:
            self._values[node] = node  # a parameter: read by the rule that knows what it is

    def _output(self, node: Node) -> None:
        for argument in node.all_input_nodes:
            for value in _flat(self.value(argument)):
                self.outputs.append(value.atoms.ravel())
                self.table.pin(value.atoms, "they are an output of the model")

    def _call(self, node: Node) -> Any:
        name = operator_name(node)
        if name == "getitem":
            container: Any = self._values[node.args[0]]  # type: ignore[index]
            return container[node.args[1]] if isinstance(container, (list, tuple)) else container  # type: ignore[index]
        if isinstance(self.module(self.module_of(node)[1]), ConstantOutput):
            return self._constant_output(node)
        known = RULES.get(name)
        if known is not None:
            self._asked.clear()
            try:
                result = known(self, node)
                self._keep_unasked(node)
                return result
            except Exception:
                # No rule foresees every way to call its operator; what it does not understand stays whole.
                logger.debug("the rule for %s did not understand %s", name, node.format_node(), exc_info=True)
                return self.unusual(node)
        if not any(isinstance(leaf, Tensor) for leaf in _leaves(node.meta.get("val"))):
            return None
        operator_label = str(node.target)
        where = self.where(node)
        self.unknown.setdefault(operator_label, where)
        return self.opaque(node, f"they reach {operator_label} in {where}, an operator without a rule")

    def _keep_unasked(self, node: Node) -> None:
        """Keep whole what an operator reads and its rule asks nothing about: the grid to sample at, a blur's kernel."""
        for given in node.all_input_nodes:
            if given not in self._asked:
                for value in _flat(self.value(given)):
                    self.table.pin(
                        value.atoms, f"{node.target} in {self.where(node)} reads them beside its data"
                    )

    def _constant_output(self, node: Node) -> Value:
        """The constant of a `ConstantOutput`: its last operator gives it the layer's shape."""
        _, name = self.module_of(node)
        module = self.module(name)
        assert isinstance(module, ConstantOutput)
        value = module.value
        shape = tuple(node.meta["val"].shape)
        dim = 1 if len(shape) > 2 else len(shape) - 1
        if shape[dim] != len(value):
            return self.pinned_value(node.meta["val"], "a ConstantOutput gives them")
        if name not in self.constant_outputs:
            self.constant_outputs[name] = self.table.fresh(len(value))
            self.ops.append(ConstantOp(name, self.constant_outputs[name], value.detach().double().cpu()))
        layout = [1] * len(shape)
        layout[dim] = len(value)
        return Value(shape, self.constant_outputs[name].reshape(layout))

    # --- what rules ask ----------------------------------------------------------------------------------------

    def value(self, node: Any) -> Any:
        """The Value (or list of Values) of `node`; a parameter becomes a loose value on its first such use."""
        self._asked.add(node)
        value = self._values.get(node)
        if isinstance(value, Node):
            return self._free_parameter(value)
        return value

    def parameter_name(self, node: Any) -> str | None:
        """The parameter or buffer that `node` is, or None."""
        assert self._capture is not None
        return self._capture.parameters.get(node.name) if isinstance(node, Node) else None

    def tensor(self, name: str) -> Tensor:
        """A parameter or buffer of the model by name."""
        path, _, attribute = name.rpartition(".")
        return getattr(self.model.get_submodule(path), attribute)

    def has_tensor(self, name: str) -> bool:
        """Whether `name` is a parameter or buffer, and no tensor that forward() makes."""
        path, _, attribute = name.rpartition(".")
        try:
            module = self.model.get_submodule(path)
        except AttributeError:
            return False
        return attribute in module._parameters or attribute in module._buffers

    def module(self, name: str) -> nn.Module:
        """A module by its name in the captured graph; the model itself where it has no such module."""
        try:
            return self.model.get_submodule(name)
        except AttributeError:
            return self.model

    def module_of(self, node: Node) -> tuple[str, str]:
        """(call key, module name) of the innermost module whose forward ran `node`."""
        stack = node.meta.get("nn_module_stack") or {}
        if not stack:
            return "", ""
        key, (name, _) = list(stack.items())[-1]
        return key, self._canonical(name)

    def where(self, node: Node) -> str:
        """The place of `node` in words."""
        _, name = self.module_of(node)
        return f"'{name}'" if name else "the model's forward"

    def positions(self, count: int) -> int:
        """`count` output positions per sample; none in a train-mode graph, since costs are those of evaluation."""
        assert self._capture is not None
        return 0 if self._capture.training else per_sample(count, self.batch)

    # --- what rules say ----------------------------------------------------------------------------------------

    def pinned_value(self, example: Tensor, reason: str) -> Value:
        """A tensor that keeps its width whatever is cut."""
        atom = self.table.fresh(1)
        self.table.pin(atom, reason)
        return Value(tuple(example.shape), atom.reshape((1,) * example.ndim))

    def opaque(self, node: Node, reason: str) -> Any:
        """Freeze what reaches `node`, and what leaves it."""
        reached = [value for argument in node.all_input_nodes for value in _flat(self.value(argument))]
        for value in reached:
            self.table.pin(value.atoms, reason)

        def freeze(example: Any) -> Any:
            if isinstance(example, Tensor):
                left = self.pinned_value(example, reason)
                self.ops.append(OpaqueOp(tuple(value.atoms.ravel() for value in reached), left.atoms.ravel()))
                return left
            if isinstance(example, (list, tuple)):
                return [freeze(item) for item in example]
            return None

        return freeze(node.meta.get("val"))

    def unusual(self, node: Node) -> Any:
        """Freeze what is around an operator that is called in a way its rule does not foresee."""
        return self.opaque(node, f"{node.target} in {self.where(node)} is used in an unusual way")

    def add_unproven_size(self, node: Node, atoms: IntArray) -> None:
        """An explicit size in `node` may fix the number of these channels."""
        place = f"{node.target} in {self.where(node)}"
        self.unproven_sizes.append(
            UnprovenSize(atoms.ravel(), place, str(node.meta.get("stack_trace", place)))
        )

    def answer_for(self, node: Node) -> None:
        """The rule knows what becomes of every tensor that `node` reads, whether it asked about it or not."""
        self._asked.update(node.all_input_nodes)

    def fresh_value(self, node: Node, dim: int) -> Value:
        """The output of a parametric operator: new atoms along `dim`."""
        shape = tuple(node.meta["val"].shape)
        layout = [1] * len(shape)
        layout[dim] = shape[dim]
        return Value(shape, self.table.fresh(shape[dim]).reshape(layout))

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

    def add_layer(
        self, node: Node, weight: Node, bias: Node | None, build: Callable[[str], LayerOp], use: Use
    ) -> bool:
        """Record a convolution or linear layer; False where its parameters are not one such module's own."""
        owner = self._owner(node, weight, bias)
        if owner is None or not isinstance(self.module(owner[0]), LAYERS):
            return False
        name, called = owner
        first = self._claim(weight, bias, name)
        use.module = name
        fresh = build(name)
        if fresh.groups > 1 and not called:
            for atoms in (use.inputs, use.outputs):
                self.table.pin(
                    atoms, f"forward() calls '{name}' as a function, with its own number of groups"
                )
        fresh.selectable = fresh.selectable and called and not self._reads_inside(node)
        # What a subclass computes around the operator is unknown; called from outside, it may not be replaced.
        fresh.replaceable = called and type(self.module(name)) in PLAIN_LAYERS
        record = self.layers.setdefault(first, fresh)
        if record is not fresh:
            self._share(record, fresh, use)
        record.uses.append(use)
        self.ops.append(LayerCall(record, use))
        self.answer_for(node)
        return True

    def add_norm(self, node: Node, weight: Any, bias: Node | None, use: Use) -> bool:
        """Record a BatchNorm; False where its parameters are not one known BatchNorm's own."""
        owner = self._owner(node, weight, bias)
        if owner is None or not is_known_batch_norm(type(self.module(owner[0]))):
            return False
        name, called = owner
        first = self._claim(weight, bias, name)
        if first != name:
            self.shared_norms |= {name, first}
            if first in self.norms:
                reason = f"the BatchNorms '{first}' and '{name}' share their parameters"
                self.table.pin(self.norms[first].inputs, reason)
                self.table.pin(self.norms[first].outputs, reason)
            return False
        use.module = name
        fresh = NormOp(name, selectable=called and not self._reads_inside(node))
        record = self.norms.setdefault(name, fresh)
        if record is not fresh:
            self._share(record, fresh, use)
        record.uses.append(use)
        self.ops.append(LayerCall(record, use))
        self.answer_for(node)
        self.norm_nodes.setdefault(name, []).append(node)
        return True

    def claimant(self, name: str) -> LayerOp | NormOp | None:
        """The convolution, linear layer or BatchNorm that cuts the parameter `name`."""
        owner = self._owned.get(id(self.tensor(name)), "")
        return self.layers.get(owner) or self.norms.get(owner)

    # --- inside ------------------------------------------------------------------------------------------------

    def _canonical(self, name: str) -> str:
        """The first of the names under which a module is registered."""
        if not self._names:
            self._names = {id(module): first for first, module in self.model.named_modules()}
        return self._names.get(id(self.module(name)), name)

    def _claim(self, weight: Node, bias: Node | None, name: str) -> str:
        """Module `name` cuts these parameters, unless another module with the same weight does; who does."""
        owner = self._owned.setdefault(id(self.tensor(self.parameter_name(weight) or "")), name)
        if bias is not None:
            self._owned.setdefault(id(self.tensor(self.parameter_name(bias) or "")), owner)
        return owner

    def _share(self, record: LayerOp | NormOp, again: LayerOp | NormOp, use: Use) -> None:
        """The same weights once more: channels go together, and what one call forbids is forbidden."""
        self.table.union(record.inputs, use.inputs)
        self.table.union(record.outputs, use.outputs)
        record.selectable &= again.selectable
        if isinstance(record, LayerOp) and isinstance(again, LayerOp):
            record.padded |= again.padded
            record.replaceable &= again.replaceable
            if record.groups != again.groups:
                for atoms in (record.inputs, record.outputs):
                    self.table.pin(atoms, f"the weight of '{record.name}' is used with different groups")

    def _owner(self, node: Node, weight: Any, bias: Node | None) -> tuple[str, bool] | None:
        """(module that holds both parameters, whether `node` ran in that module's own forward)."""
        name = self.parameter_name(weight)
        if name is None or not self.has_tensor(name):
            return None
        tensor = self.tensor(name)
        bias_name = self.parameter_name(bias)
        if bias is not None and (bias_name is None or not self.has_tensor(bias_name)):
            return None
        shift = None if bias_name is None else self.tensor(bias_name)
        _, innermost = self.module_of(node)
        # By identity: a tied weight is captured under the name of its first owner.
        for owner, called in ((innermost, True), (self._canonical(name.rpartition(".")[0]), False)):
            module = self.module(owner)
            own = (getattr(module, "weight", None), getattr(module, "running_mean", None))
            if any(tensor is mine for mine in own) and getattr(module, "bias", None) is shift:
                return owner, called
        return None

    def _reads_inside(self, node: Node) -> bool:
        """Whether the operator's input was computed within the same call of its module."""
        key, _ = self.module_of(node)
        source = node.args[0]
        stack = source.meta.get("nn_module_stack") if isinstance(source, Node) else None
        return bool(stack) and key in stack  # type: ignore[operator]

    def _free_parameter(self, node: Node) -> Value:
        name = self.parameter_name(node)
        assert name is not None
        tensor = self.tensor(name)
        wide = [dim for dim, size in enumerate(tensor.shape) if size > 1]
        if name not in self.free_parameters:
            atoms = self.table.fresh(tensor.shape[wide[0]] if len(wide) == 1 else 1)
            if len(wide) != 1:
                self.table.pin(atoms, f"they are combined with '{name}', whose shape is fixed")
            self.free_parameters[name] = FreeParameter(name, wide[0] if len(wide) == 1 else -1, atoms)
        loose = self.free_parameters[name]
        layout = [1] * tensor.ndim
        if loose.dim >= 0:
            layout[loose.dim] = tensor.shape[loose.dim]
        return Value(tuple(tensor.shape), loose.atoms.reshape(layout))


def _leaves(example: Any) -> list[Any]:
    if isinstance(example, (list, tuple)):
        return [leaf for item in example for leaf in _leaves(item)]
    return [example]


def _flat(value: Any) -> list[Value]:
    if isinstance(value, Value):
        return [value]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _flat(item)]
    return []
