"""Walk the operators of a capture in order and let each operator's rule relate its channels."""

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from softprune.graph.builder import GraphBuilder, Value
from softprune.graph.capture import Capture
from softprune.graph.modules import ConstantOutput
from softprune.graph.ops import ConstantOp, OpaqueOp
from softprune.graph.rules import elementwise, layers, pieces, sums, views  # noqa: F401  (they register the rules)
from softprune.graph.rules.registry import OPERATORS, RULES, operator_name
from softprune.log import get_logger

logger = get_logger(__name__)


def walk(builder: GraphBuilder, capture: Capture) -> None:
    """Relate the channels of one captured forward pass."""
    builder.provenance.capture = capture
    builder.values = {}
    overwritten = _overwritten_by(capture.nodes)
    for node in capture.nodes:
        if node.op == "placeholder":
            _placeholder(builder, node)
        elif node.op == "output":
            for value in builder.values_of(node.all_input_nodes):
                builder.outputs.append(value.atoms.ravel())
                builder.table.pin(value.atoms, "they are an output of the model")
        elif node.op == "call_function":
            builder.values[node] = _call(builder, node)
        else:
            builder.values[node] = builder.opaque(node, f"'{node.op}' nodes have no rule")
        for stale in overwritten[node]:
            _overwritten(builder, stale, node)


def _overwritten(builder: GraphBuilder, stale: Node, writer: Node) -> None:
    """`writer` wrote into the memory of `stale`, which is read again: what it holds then has no rule."""
    value = builder.values.get(stale)
    if isinstance(value, Value):
        reason = f"{writer.target} in {builder.where(writer)} overwrites a part of them"
        builder.table.pin(value.atoms, reason)
        builder.values[stale] = changed = builder.pinned_value(value.shape, reason)
        sources = [value, *builder.values_of([writer])]  # an input may reach it through what was written
        builder.ops.append(OpaqueOp(tuple(source.atoms.ravel() for source in sources), changed.atoms.ravel()))


def _placeholder(builder: GraphBuilder, node: Node) -> None:
    example = node.meta.get("val")
    if not isinstance(example, Tensor):
        builder.values[node] = None
        return
    name = builder.provenance.parameter_name(node)
    if name is None:
        builder.values[node] = builder.pinned_value(
            example.shape, f"they are combined with the model's input '{node.name}'"
        )
    elif not builder.provenance.has_tensor(name):
        # forward() copies the tensors that it makes. One that is stored somewhere may have changed at the cut.
        made = all(operator_name(user) == "lift_fresh_copy" for user in node.users)
        known = made and type(example) is Tensor and example.numel() == 1 and not example.is_meta
        builder.values[node] = builder.constant_value(example.shape, example.item() if known else None)
    else:
        builder.values[node] = node  # a parameter: read by the rule that knows what it is


def _call(builder: GraphBuilder, node: Node) -> Any:
    name = operator_name(node)
    if name == "getitem":
        container: Any = builder.values[node.args[0]]  # type: ignore[index]
        return container[node.args[1]] if isinstance(container, (list, tuple)) else container  # type: ignore[index]
    if isinstance(builder.provenance.module(builder.provenance.module_of(node)[1]), ConstantOutput):
        return _constant_output(builder, node)
    entry = OPERATORS.get(name)
    if entry is not None:
        builder.asked.clear()
        try:
            result = RULES[entry.kind](builder, node)
            # Kept whole: what the operator reads and its rule asks nothing about, such as the grid to sample at.
            for value in builder.values_of([given for given in node.all_input_nodes if given not in builder.asked]):
                builder.table.pin(value.atoms, f"{node.target} in {builder.where(node)} reads them beside its data")
            return result
        except Exception:
            # No rule foresees every way to call its operator; what it does not understand stays whole.
            logger.debug("the rule for %s did not understand %s", name, node.format_node(), exc_info=True)
            return builder.unusual(node)
    example = node.meta.get("val")
    if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(example)):
        return None
    if isinstance(example, Tensor) and not node.all_input_nodes:
        return builder.constant_value(example.shape)  # arange, eye, randn
    label, where = str(node.target), builder.where(node)
    reason = f"they reach {label} in {where}, an operator without a rule"
    builder.unknown[reason] = (label, where)
    return builder.opaque(node, reason)


def _constant_output(builder: GraphBuilder, node: Node) -> Value:
    """The constant of a `ConstantOutput`: its last operator gives it the layer's shape."""
    _, name = builder.provenance.module_of(node)
    module = builder.provenance.module(name)
    assert isinstance(module, ConstantOutput)
    value = module.value
    shape = tuple(node.meta["val"].shape)
    dim = 1 if len(shape) > 2 else len(shape) - 1
    if shape[dim] != len(value):
        return builder.pinned_value(shape, "a ConstantOutput gives them")
    if name not in builder.constant_outputs:
        builder.constant_outputs[name] = builder.table.fresh(len(value))
        builder.ops.append(ConstantOp(name, builder.constant_outputs[name], value.detach().double().cpu()))
    return Value.with_channels(shape, dim, builder.constant_outputs[name])


def _overwritten_by(nodes: Sequence[Node]) -> dict[Node, list[Node]]:
    """Return the tensors that a node changes because they share the memory that it writes, and that are read again.

    The graph follows ``x += y`` and ``relu(x, inplace=True)`` itself: later readers of `x` read the result. It does
    not follow writes through views: after ``x[:, :4] = 0`` later readers of `x` still point at the node before it.
    """
    order = {node: number for number, node in enumerate(nodes)}
    groups: dict[Node, set[Node]] = {}
    for node in nodes:
        shared = _shares_with(node)
        if shared is not None:
            groups[node] = groups.setdefault(shared, {shared})
            groups[node].add(node)
    found = {}
    for node, here in order.items():
        written = _written(node)
        earlier = [other for other in groups.get(written, ()) if order[other] < here] if written is not None else []
        found[node] = [other for other in earlier if any(order[user] > here for user in other.users)]
    return found


def _shares_with(node: Node) -> Node | None:
    """The argument whose memory `node` shares, by its operator's schema."""
    if node.op != "call_function":
        return None
    first = node.args[0] if node.args else None
    if node.target is operator.getitem:
        return first if isinstance(first, Node) else None
    schema = getattr(node.target, "_schema", None)
    if schema is None or not isinstance(first, Node):
        return None
    aliased = any(result.alias_info is not None for result in schema.returns)
    return first if aliased else None


def _written(node: Node) -> Node | None:
    """The argument that `node` writes into."""
    schema = getattr(node.target, "_schema", None) if node.op == "call_function" else None
    for position, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.alias_info is not None and argument.alias_info.is_write and position < len(node.args):
            written = node.args[position]
            return written if isinstance(written, Node) else None
    return None
