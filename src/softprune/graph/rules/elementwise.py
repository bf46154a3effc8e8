"""Rules for operators that treat every channel by itself, alone or with its counterpart in a second tensor."""

import operator
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node

from softprune.graph.builder import GraphBuilder, Value
from softprune.graph.channels import PAD, IntArray
from softprune.graph.ops import BinaryOp, ChannelwiseOp, Evaluate, identity
from softprune.graph.rules.registry import OPERATORS, activation_of, argument, operator_name, rule

SUMS = ("add", "sub", "rsub", "subtract")
PRODUCTS = ("mul", "multiply", "max_unpool2d", "max_unpool3d")
"""Zero where either tensor is; no index that max_unpool reads is a known constant."""
QUOTIENTS = ("div", "divide", "true_divide")


def _tensors(node: Node) -> list[Node]:
    """The tensors that the node's operator is given."""
    return [given for given in node.args if isinstance(given, Node)]


def _apply(node: Node, *positions: int) -> Evaluate:
    """The node's own operator on constants in place of its tensors, which stand at these positions."""
    given: list[Any] = [node.args[position] for position in positions]
    if len(given) != sum(isinstance(each, Node) for each in (*node.args, *node.kwargs.values())):
        raise NotImplementedError(f"{node.target} with further tensors")
    kinds = [tensor.meta["val"].dtype for tensor in given]

    def evaluate(*constants: Tensor) -> Tensor:
        args = list(node.args)
        for position, kind, values in zip(positions, kinds, constants, strict=True):
            args[position] = _as(kind, values.clone())
        return _as(node.meta["val"].dtype, node.target(*args, **node.kwargs))  # type: ignore[operator]

    return evaluate


def _as(kind: torch.dtype, constants: Tensor) -> Tensor:
    """Return constants in a dtype whose arithmetic differs: integers wrap around, and casts to them truncate."""
    return constants if kind.is_floating_point else constants.to(kind)


def add_channelwise(
    builder: GraphBuilder,
    node: Node,
    value: Value,
    evaluate: Evaluate | None,
    keeps_zero: bool = True,
    activation: str | None = None,
) -> Any:
    """Give `node` channels that follow those of `value`, each computed from its own."""
    examples = node.meta["val"]
    if isinstance(examples, (list, tuple)):
        output = Value(tuple(examples[0].shape), builder.table.follow(value.atoms))
        builder.ops.append(ChannelwiseOp(value.atoms, output.atoms, evaluate, keeps_zero))
        # Where in its channel each value was found: no constant, even if the channel is one.
        indices = builder.table.follow(value.atoms)
        builder.ops.append(ChannelwiseOp(value.atoms, indices, None, keeps_zero=False))
        return [output, *(Value(tuple(example.shape), indices) for example in examples[1:])]
    output = builder.followed_value(node, value.atoms)
    builder.ops.append(ChannelwiseOp(value.atoms, output.atoms, evaluate, keeps_zero, activation))
    return output


@rule("pointwise")
def pointwise(builder: GraphBuilder, node: Node) -> Any:
    tensors = _tensors(node)
    if len(tensors) > 1:
        return two_tensors(builder, node)
    value = builder.value(tensors[0])
    if not isinstance(value, Value) or not isinstance(node.meta.get("val"), Tensor):
        return builder.unusual(node)
    evaluate = _apply(node, list(node.args).index(tensors[0]))
    return add_channelwise(builder, node, value, evaluate, activation=activation_of(node))


@rule("copy")
def copies(builder: GraphBuilder, node: Node) -> Any:
    value = builder.value(node.args[0])
    builder.answer_for(node)  # of a second tensor, dtype and device alone are taken
    if not isinstance(value, Value):
        return builder.unusual(node)
    kind = node.meta["val"].dtype
    return add_channelwise(builder, node, value, identity if kind.is_floating_point else partial(_as, kind))


@rule("fill")
def fills(builder: GraphBuilder, node: Node) -> Any:
    """A constant in the shape of a tensor: its channels follow the tensor's, its values come from zero padding."""
    output = builder.followed_value(node, builder.value(node.args[0]).atoms)
    builder.ops.append(ChannelwiseOp(np.full_like(output.atoms, PAD), output.atoms, _apply(node, 0)))
    return output


@rule("zeros")
def zeros(builder: GraphBuilder, node: Node) -> Any:
    """Zeros in a shape of their own: padding, once they are joined to channels."""
    builder.answer_for(node)  # of a tensor, dtype and device alone are taken
    shape = tuple(node.meta["val"].shape)
    return Value(shape, np.full((1,) * len(shape), PAD))


@rule("constant")
def constant(builder: GraphBuilder, node: Node) -> Any:
    builder.answer_for(node)  # of a tensor, dtype and device alone are taken
    return builder.constant_value(node.meta["val"].shape)


@rule("random")
def random(builder: GraphBuilder, node: Node) -> Any:
    value = builder.value(node.args[0])
    training = argument(node, 2, "train", False)
    return add_channelwise(builder, node, value, None if training else identity)


@rule("spatial")
def spatial(builder: GraphBuilder, node: Node) -> Any:
    value = builder.value(node.args[0])
    rank = re.search(r"([123])d", operator_name(node))
    # Without a batch dimension, or with one too few, the operator's space is where the channels are.
    if value.along(1) is None or (rank is not None and len(value.shape) != int(rank[1]) + 2):
        return builder.opaque(node, f"{node.target} in {builder.where(node)} mixes them")
    evaluate = identity if OPERATORS[operator_name(node)].keeps_constants else None
    return add_channelwise(builder, node, value, evaluate)


@rule("arithmetic")
def arithmetic(builder: GraphBuilder, node: Node) -> Any:
    tensors = _tensors(node)
    if len(tensors) == 2:
        return two_tensors(builder, node)
    value = builder.value(tensors[0])
    if not isinstance(value, Value):
        return None
    if operator_name(node) in PRODUCTS and any(isinstance(each, (int, float)) and each == 0 for each in node.args):
        return fills(builder, node)
    return add_channelwise(builder, node, value, _apply(node, list(node.args).index(tensors[0])))


def two_tensors(builder: GraphBuilder, node: Node) -> Any:
    """An element-wise operator on two tensors, with broadcasting: counterparts are cut together."""
    left, right = (builder.value(tensor) for tensor in _tensors(node))
    if not isinstance(left, Value) or not isinstance(right, Value):
        return builder.unusual(node)
    rank = node.meta["val"].ndim
    left, right = _padded(left, rank), _padded(right, rank)
    positions = [index for index, given in enumerate(node.args) if isinstance(given, Node)]
    name = operator_name(node)
    if name in QUOTIENTS and not node.kwargs:
        return combined(builder, node, left, _inverse(builder, right), operator.mul, absorbs_zero=True)
    evaluate = _apply(node, *positions)
    return combined(builder, node, left, right, evaluate, absorbs_zero=name in PRODUCTS, adds=name in SUMS)


def _inverse(builder: GraphBuilder, value: Value) -> Value:
    """What x / y multiplies x with: zero where x is, whatever y is."""
    inverse = builder.table.follow(value.atoms)
    builder.ops.append(ChannelwiseOp(value.atoms, inverse, torch.reciprocal, keeps_zero=False))
    return Value(value.shape, inverse)


@rule("add_product")
def add_product(builder: GraphBuilder, node: Node) -> Any:
    """x + value * left * right, or x + value * left / right."""
    if set(node.kwargs) - {"value"} or not node.meta["val"].is_floating_point():
        return builder.unusual(node)
    total, left, right = (_padded(builder.value(given), node.meta["val"].ndim) for given in node.args)
    right = _inverse(builder, right) if operator_name(node) == "addcdiv" else right
    factor, shape = node.kwargs.get("value", 1), np.broadcast_shapes(left.shape, right.shape)
    product = combined(builder, node, left, right, lambda a, b: factor * a * b, absorbs_zero=True, shape=shape)
    return combined(builder, node, total, product, operator.add, adds=True)


def combined(
    builder: GraphBuilder,
    node: Node,
    left: Value,
    right: Value,
    evaluate: Evaluate,
    *,
    absorbs_zero: bool = False,
    adds: bool = False,
    shape: Sequence[int] | None = None,
) -> Value:
    """Two tensors of the output's rank, value by value, with broadcasting; `shape` is the node's if it is not given."""
    outputs = _bound(builder, node, left, right)
    one, other = (atoms.ravel() for atoms in np.broadcast_arrays(left.atoms, right.atoms))
    builder.ops.append(BinaryOp(one, other, outputs.ravel(), evaluate, absorbs_zero, adds))
    return Value(tuple(node.meta["val"].shape if shape is None else shape), outputs)


def _bound(builder: GraphBuilder, node: Node, left: Value, right: Value) -> IntArray:
    """Tie the channels of two tensors that meet in `node`, and return those of the result."""
    for one, other in ((left, right), (right, left)):
        for dim in filter(one.varies_along, range(len(one.shape))):
            if other.shape[dim] != 1 and not other.varies_along(dim) and differ_along(builder, one, dim):
                builder.table.union(
                    one.atoms, np.broadcast_to(other.atoms, np.broadcast_shapes(one.atoms.shape, other.atoms.shape))
                )
            elif other.shape[dim] == 1 and other.atoms.size == 1:
                # Broadcast over the channels: a single channel of its own must not vanish.
                builder.table.pin(other.atoms, f"one of them is broadcast in {builder.where(node)}")
    # Only where both sides really have the channel: a broadcast side does not bind it.
    if left.atoms.shape == right.atoms.shape:
        builder.table.union(left.atoms, right.atoms)
        return builder.table.follow(left.atoms)
    _bind_common(builder, left, right)
    both = np.broadcast_arrays(left.atoms, right.atoms)
    return builder.table.follow(both[0] if left.atoms.size >= right.atoms.size else both[1])


@rule("choose")
def choose(builder: GraphBuilder, node: Node) -> Any:
    """One of two values, by a condition: constant where both are the same constant, whatever the condition says."""
    condition, *given = node.args if operator_name(node) == "where" else [node.args[i] for i in (1, 0, 2)]
    if len(given) != 2:
        return builder.unusual(node)
    shape = tuple(node.meta["val"].shape)
    where, *values = [
        _padded(builder.value(each), len(shape)) for each in (condition, *given) if isinstance(each, Node)
    ]
    # The condition shares its channels with the result; none of its values reaches it.
    unread = builder.table.follow(where.atoms)
    builder.ops.append(ChannelwiseOp(where.atoms, unread, None, keeps_zero=False))
    if not values:  # where(condition, 1.0, 0.0)
        return Value(shape, unread)
    if len(values) == 2:
        chosen = combined(builder, node, values[0], values[1], equal)
    else:
        number: Any = next(each for each in given if not isinstance(each, Node))
        chosen = Value(shape, builder.table.follow(values[0].atoms))
        builder.ops.append(ChannelwiseOp(values[0].atoms, chosen.atoms, lambda constants: equal(constants, number)))
    outputs = _bound(builder, node, where, chosen)
    source = np.ascontiguousarray(np.broadcast_to(chosen.atoms, outputs.shape))
    builder.ops.append(ChannelwiseOp(source, outputs, identity))
    return Value(shape, outputs)


@rule("accumulate")
def accumulate(builder: GraphBuilder, node: Node) -> Any:
    """Slices of a tensor added to those of another, by an index: the sums of a graph network over edges."""
    target, source = builder.value(node.args[0]), builder.value(node.args[3])
    dim = node.args[1] % len(target.shape)  # type: ignore[operator]
    if target.varies_along(dim) or source.varies_along(dim):
        return builder.opaque(node, f"{node.target} in {builder.where(node)} mixes them")
    # How often a constant is added depends on the index.
    return combined(builder, node, target, source, lambda left, right: torch.where(right == 0, left, torch.nan))


def equal(left: Tensor, right: Tensor) -> Tensor:
    """The common value of two constants; NaN where they differ."""
    return torch.where(left == right, left, torch.nan)


@rule("gated")
def gated(builder: GraphBuilder, node: Node) -> Any:
    """The first half of the channels times the sigmoid of the second: counterparts are cut together."""
    value = builder.value(node.args[0])
    dim = argument(node, 1, "dim", -1) % len(value.shape)
    left, right = builder.moved(lambda atoms: torch.chunk(atoms, 2, dim), [value])
    gates = Value(right.shape, builder.table.follow(right.atoms))
    builder.ops.append(ChannelwiseOp(right.atoms, gates.atoms, torch.sigmoid, keeps_zero=False))
    return combined(builder, node, left, gates, operator.mul, absorbs_zero=True)


def differ_along(builder: GraphBuilder, value: Value, dim: int) -> bool:
    """Whether channels that may be cut one without the other meet along `dim` (paths of an SKNet do not)."""
    classes = builder.table.find(value.atoms)
    return bool((classes != classes.take([0], axis=dim)).any())


def _padded(value: Value, rank: int) -> Value:
    missing = rank - len(value.shape)
    return Value((1,) * missing + value.shape, value.atoms.reshape((1,) * missing + value.atoms.shape))


def _bind_common(builder: GraphBuilder, left: Value, right: Value) -> None:
    """Tie along dimensions that both vary along; the wider side varies along further ones as well."""
    narrow, wide = sorted((left, right), key=lambda value: value.atoms.size)
    shared = all(narrow.atoms.shape[dim] in (1, wide.atoms.shape[dim]) for dim in range(narrow.atoms.ndim)) and any(
        size > 1 for size in narrow.atoms.shape
    )
    if shared:
        builder.table.union(np.broadcast_to(narrow.atoms, wide.atoms.shape), wide.atoms)
    elif narrow.atoms.size > 1:
        reason = "two tensors with channels along different dimensions are combined"
        builder.table.pin(narrow.atoms, reason)
        builder.table.pin(wide.atoms, reason)
