"""Trace a model: apply the rules of its operators in order of execution to build the channel graph."""

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor, nn
from torch.fx import Node

from softprune.errors import ModelError
from softprune.graph.builder import GraphBuilder, Opaque, Value, operator_name
from softprune.graph.channels import Branch, ChannelGraph, ConstantOp, IntArray, LayerOp, NormOp
from softprune.graph.modules import ConstantOutput
from softprune.graph.operators import OPERATORS
from softprune.graph.reader import Example, ExampleLike, ForwardPass, read_passes, size_dependence
from softprune.graph.sites import find_groups, find_sites
from softprune.log import get_logger

logger = get_logger(__name__)


def _walk(builder: GraphBuilder, forward: ForwardPass) -> None:
    """Apply the rule of each operator, in order."""
    builder.training, builder.values = forward.training, {}
    overwritten = _overwritten_by(forward.nodes)
    for node in forward.nodes:
        if node.op == "placeholder":
            builder.values[node] = _placeholder(builder, node)
        elif node.op == "output":
            for value in builder.values_of(node.all_input_nodes):
                builder.graph.outputs.append(value.atoms.ravel())
                builder.table.pin(value.atoms, "they are an output of the model")
        else:
            builder.values[node] = _call(builder, node)
        for stale in overwritten.get(node, ()):
            _overwrite(builder, stale, node)
    if not forward.training:
        builder.graph.branches = _branches(builder, forward.nodes)


def _placeholder(builder: GraphBuilder, node: Node) -> Any:
    example = node.meta["val"]
    if "tensor" in node.meta:
        return node  # a parameter, which the rule of its reader interprets
    if "made" not in node.meta:
        return builder.pinned_value(example.shape, f"they are combined with the model's input '{node.name}'")
    # Tensors created in forward() are copied. Others are stored somewhere and may change before the cut.
    made = all(operator_name(user) == "lift_fresh_copy" for user in node.users)
    known = made and type(example) is Tensor and example.numel() == 1 and not example.is_meta
    return builder.constant_value(example.shape, example.item() if known else None)


def _call(builder: GraphBuilder, node: Node) -> Any:
    """Return the output of an operator by its rule; without a rule, freeze its inputs."""
    name, example = operator_name(node), node.meta["val"]
    if name == "getitem":
        container: Any = builder.values[node.args[0]]  # type: ignore[index]
        return container[node.args[1]] if isinstance(container, list) else container  # type: ignore[index]
    if isinstance(builder.module_of(node), ConstantOutput):
        return _constant_output(builder, node)
    entry = OPERATORS.get(name)
    if entry is not None:
        builder.asked.clear()
        try:
            result = entry.rule(builder, node, entry)
        except Opaque as what:
            return builder.opaque(node, builder.reason(node, what))
        # Pin the inputs that the rule did not ask about, such as a sampling grid.
        for value in builder.values_of([given for given in node.all_input_nodes if given not in builder.asked]):
            builder.table.pin(value.atoms, builder.reason(node, "reads them beside its data"))
        return result
    if isinstance(example, Tensor) and not node.all_input_nodes:
        return builder.constant_value(example.shape)  # arange, eye, randn
    place = builder.place(node)
    reason = f"they reach {node.target} in {place}, an operator without a rule"
    builder.unknown[reason] = (str(node.target), place)
    return builder.opaque(node, reason)


def _constant_output(builder: GraphBuilder, node: Node) -> Value:
    """Return the constant of a `ConstantOutput`, whose last operator returns it in the shape of the layer's output."""
    name = builder.module_name(node)
    module = builder.modules[name]
    assert isinstance(module, ConstantOutput)
    shape = tuple(node.meta["val"].shape)
    dim = 1 if len(shape) > 2 else len(shape) - 1
    if shape[dim] != len(module.value):
        return builder.pinned_value(shape, "they are inside a ConstantOutput")
    if name not in builder.constant_outputs:
        atoms = builder.constant_outputs[name] = builder.table.fresh(len(module.value))
        builder.graph.ops.append(ConstantOp(name, atoms, module.value.detach().double().cpu()))
    return Value.with_channels(shape, dim, builder.constant_outputs[name])


# --- writes through views ------------------------------------------------------------------------------------------


def _overwrite(builder: GraphBuilder, stale: Node, writer: Node) -> None:
    """Freeze a tensor whose memory `writer` has overwritten and that is read again."""
    value = builder.values.get(stale)
    if isinstance(value, Value):
        reason = builder.reason(writer, "overwrites a part of them")
        builder.table.pin(value.atoms, reason)
        sources = [value, *builder.values_of([writer])]  # it may depend on inputs through the written values
        builder.values[stale] = builder.mixed(value.shape, reason, [source.atoms for source in sources])


def _overwritten_by(nodes: Sequence[Node]) -> dict[Node, list[Node]]:
    """Return for each node the tensors that share the memory it writes to and are read again later.

    The graph handles ``x += y`` and ``relu(x, inplace=True)``, since later readers of `x` read the result. It does not
    handle writes through views: after ``x[:, :4] = 0``, later readers of `x` still refer to the earlier node.
    """
    order = {node: number for number, node in enumerate(nodes)}
    memory: dict[Node, set[Node]] = {}
    """Maps nodes to the nodes that share their memory."""
    found: dict[Node, list[Node]] = {}
    for node, here in order.items():
        schema, first = getattr(node.target, "_schema", None), next(iter(node.args), None)
        shares = schema is not None and any(result.alias_info is not None for result in schema.returns)
        if isinstance(first, Node) and (shares or node.target is operator.getitem):
            memory[node] = memory.setdefault(first, {first})
            memory[node].add(node)
        for written in _written_by(node):
            earlier = [other for other in memory.get(written, ()) if order[other] < here]
            found[node] = [other for other in earlier if any(order[user] > here for user in other.users)]
    return found


def _written_by(node: Node) -> Iterator[Node]:
    """Yield the tensors that a node changes in place."""
    schema = getattr(node.target, "_schema", None)
    for parameter, written in zip([] if schema is None else schema.arguments, node.args, strict=False):
        if parameter.alias_info is not None and parameter.alias_info.is_write and isinstance(written, Node):
            yield written


# --- modules that may be removed as a whole ------------------------------------------------------------------------


def _branches(builder: GraphBuilder, nodes: Sequence[Node]) -> list[Branch]:
    """Return the modules that affect the rest of the network only by their result, in order of their calls."""
    members: dict[str, set[Node]] = {}
    for node in nodes:
        for key, _ in node.meta.get("calls", ()):
            members.setdefault(key, set()).add(node)
    calls = Counter(key.rpartition("@")[0] for key in members)
    given = [(*call, source, node) for node in nodes for call, source in node.meta.get("returned", ())]
    found = []
    for key, name, source, result in sorted(given, key=lambda call: int(call[0].rpartition("@")[2])):
        own = members.get(key, set())
        if name and calls[name] == 1 and result in own and _stands_alone(builder, name, own, result, nodes):
            with suppress(Opaque):
                found.append(Branch(name, builder.tensor(result).along(1), *_added(builder, own, source, result)))
    return found


def _added(builder: GraphBuilder, own: set[Node], source: Node, result: Node) -> tuple[IntArray | None, str]:
    """Return the tensor that a module adds to its input, and the activation after the sum; None for other modules."""
    activation = operator_name(result) if operator_name(result) == "relu" else ""
    total = result.args[0] if activation else result
    if not isinstance(total, Node) or total not in own or source in own or operator_name(total) != "add":
        return None, ""
    others = [each for each in total.args if each is not source]
    if len(others) != 1 or len(total.args) != 2 or total.kwargs or not isinstance(others[0], Node):
        return None, ""
    added = builder.tensor(others[0]).along(1)
    return (added, activation) if len(added) == result.meta["val"].shape[1] else (None, "")


def _stands_alone(builder: GraphBuilder, name: str, own: set[Node], result: Node, nodes: Sequence[Node]) -> bool:
    """Return whether a module has layers and other modules read and write only its `result`."""
    if not own.isdisjoint(builder.unread):  # their cost is only known for the whole network
        return False
    used = all(own.issuperset(node.users) and own.issuperset(_written_by(node)) for node in own - {result})
    layers = [record for each, record in builder.called.items() if each.startswith(f"{name}.")]
    if not (used and own.issuperset(_written_by(result)) and layers and all(len(layer.uses) == 1 for layer in layers)):
        return False
    tensors = (node for node in nodes if str(node.meta.get("tensor", "")).startswith(f"{name}."))
    return all(own.issuperset(node.users) for node in tensors)


# --- from a model to its graph -------------------------------------------------------------------------------------


def check_is_module(model: object, name: str = "model") -> None:
    """Raise a ModelError unless `model` is an nn.Module. Usual mistakes are a class, or swapped arguments."""
    if not isinstance(model, nn.Module):
        got = f"the class {model.__name__}, not an instance" if isinstance(model, type) else type(model).__name__
        raise ModelError(f"`{name}` must be a torch.nn.Module. Got {got}; build the network and pass it.")


def check_is_bare(model: nn.Module, name: str, then: str = "") -> None:
    """Raise a ModelError for a wrapper, whose class and names would end up in the compact network and its file."""
    inner = "_orig_mod" if "_orig_mod" in model._modules else "module"
    if inner == "_orig_mod" or isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ModelError(
            f"`{name}` must be the network itself, not a wrapper. Got {type(model).__name__}; pass "
            f"{name}.{inner}{then}."
        )


def _keep_shared(builder: GraphBuilder) -> None:
    """Freeze modules whose tensors are shared with other modules or used outside their module."""
    names: dict[int, list[str]] = {}
    records: dict[int, list[LayerOp | NormOp]] = {}
    for path, module in builder.modules.items():
        record = builder.called.get(path)
        for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and tensor.ndim:  # without num_batches_tracked
                names.setdefault(id(tensor), []).append(f"{path}.{attribute}".lstrip("."))
                # Other tensors of a layer are not cut.
                if record is not None and (isinstance(record, NormOp) or attribute in ("weight", "bias")):
                    records.setdefault(id(tensor), []).append(record)
    free = {id(builder.tensors[name]): read for name, read in builder.graph.free_parameters.items()}
    for key, (name, *others) in names.items():
        cut, outside = records.get(key, []), free.get(key)
        if not others and not (cut and outside):
            continue
        reason = f"'{name}' is also {' and '.join(map(repr, others)) or 'used outside its module'}"
        if outside:
            builder.table.pin(outside.atoms, reason)
        for record in cut:
            builder.table.pin(record.inputs, reason)
            builder.table.pin(record.outputs, reason)
            record.selectable = False
            if isinstance(record, LayerOp):
                record.replaceable = False


def _freezing_operators(builder: GraphBuilder) -> dict[str, str]:
    """Return the operators without a rule that freeze channels of layers or BatchNorms, with their locations."""
    reasons = set().union(*(builder.table.reasons(record.outputs) for record in builder.called.values()))
    return dict(builder.unknown[reason] for reason in builder.unknown if reason in reasons)


def trace(model: nn.Module, example: ExampleLike) -> ChannelGraph:
    """Return the channel graph of `model`, traced on `example`. The model is not changed."""
    check_is_module(model)
    check_is_bare(model, "model", ", and wrap or compile the network after the pruner is made")
    passes = read_passes(model, example)
    read = passes[0].example
    shown = Example.of(example).to_model(model).first(2) if passes[0].any_batch else read
    graph = ChannelGraph(shown, {name: parameter.numel() for name, parameter in model.named_parameters()})
    builder = GraphBuilder(model, read.batch_size() or 1, graph)
    for forward in passes:
        _walk(builder, forward)
    _keep_shared(builder)
    graph.sites, graph.frozen = find_sites(builder)
    graph.grouped = find_groups(builder, graph.sites, graph.frozen)
    graph.classes, graph.pinned = builder.table.classes(), builder.table.pinned()
    graph.unreached = tuple(sorted(set.intersection(*(each.parameters_unread(model) for each in passes))))
    graph.unknown = _freezing_operators(builder)
    graph.size_dependence = size_dependence(model, passes[0])
    if graph.size_dependence:
        logger.warning(
            "softprune: %s: the operators of forward() depend on the input size (%s). A cut is verified only at some "
            "sizes; pass inputs of the other sizes to softprune.verify.",
            type(model).__name__,
            graph.size_dependence,
        )
    return graph
