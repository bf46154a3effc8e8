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

from softprune.graph.builder import GraphBuilder, Opaque, Operator, Value, argument, operator_name
from softprune.graph.channels import PAD, IntArray
from softprune.graph.ops import BinaryOp, ChannelwiseOp, Evaluate, identity

SUMS = ("add", "sub", "rsub")
PRODUCTS = ("mul", "max_unpool2d", "max_unpool3d")
"""Zero where either tensor is; no index that max_unpool reads is a known constant."""


# --- one tensor ----------------------------------------------------------------------------------------------------


def pointwise(builder: GraphBuilder, node: Node, entry: Operator) -> Any:
    """Map one value at a time: an activation, or arithmetic with a number."""
    given = [place for place, each in enumerate(node.args) if isinstance(each, Node)]
    if len(given) == 2:
        return _two_tensors(builder, node)
    if not given or not isinstance(node.meta["val"], Tensor):
        raise Opaque("is used in an unusual way")
    value = builder.tensor(node.args[given[0]])
    if operator_name(node) == "mul" and any(isinstance(each, (int, float)) and each == 0 for each in node.args):
        return fill(builder, node, entry)
    return channelwise(builder, node, value, _applied(node, given[0]), activation=entry.activation_of(node))


def copied(builder: GraphBuilder, node: Node, entry: Operator) -> Any:
    """Copy values, perhaps to another dtype or device."""
    builder.answer_for(node)  # of a second tensor, dtype and device alone are taken
    value, kind = builder.tensor(node.args[0]), node.meta["val"].dtype
    return channelwise(builder, node, value, identity if kind.is_floating_point else partial(_as, kind))


def dropout(builder: GraphBuilder, node: Node, entry: Operator) -> Any:
    """Drop values at random in training."""
    return channelwise(builder, node, builder.tensor(node.args[0]), None if argument(node, 2, False) else identity)


def spatial(builder: GraphBuilder, node: Node, entry: Operator) -> Any:
    """Compute within each channel, over space: pooling, resampling."""
    value = builder.tensor(node.args[0])
    rank = re.search(r"([123])d", operator_name(node))
    # Without a batch dimension, or with one too few, the operator's space is where the channels are.
    if rank is not None and len(value.shape) != int(rank[1]) + 2:
        raise Opaque("mixes them")
    value.along(1)
    return channelwise(builder, node, value, identity if entry.keeps_constants else None)


def along_space(builder: GraphBuilder, node: Node, entry: Operator) -> Any:
    """Compute along one dimension, which must not be that of the channels: softmax, cumsum."""
    value, dim = builder.tensor(node.args[0]), argument(node, 1)
    if not isinstance(dim, int) or builder.differ_along(value, dim % len(value.shape)):
        raise Opaque("mixes them")
    return channelwise(builder, node, value, None, keeps_zero=entry.at_zero == 0)


def fill(builder: GraphBuilder, node: Node, entry: Operator) -> Any:
    """Make a constant in the shape of a tensor: channels follow the tensor's, values come from zero padding."""
    source = next(place for place, given in enumerate(node.args) if isinstance(given, Node))
    output = builder.followed_value(node, builder.tensor(node.args[source]).atoms)
    builder.ops.append(ChannelwiseOp(np.full_like(output.atoms, PAD), output.atoms, _applied(node, source)))
    return output


def zeros(builder: GraphBuilder, node: Node, entry: Operator) -> Any:
    """Make zeros in a shape of their own: padding, once they are joined to channels."""
    builder.answer_for(node)  # of a tensor, dtype and device alone are taken
    shape = tuple(node.meta["val"].shape)
    return Value(shape, np.full((1,) * len(shape), PAD))


def constant(builder: GraphBuilder, node: Node, entry: Operator) -> Any:
    """Make a constant in a shape of its own."""
    builder.answer_for(node)  # of a tensor, dtype and device alone are taken
    return builder.constant_value(node.meta["val"].shape)


# --- two tensors ---------------------------------------------------------------------------------------------------


def _two_tensors(builder: GraphBuilder, node: Node) -> Any:
    """Combine two tensors value by value, with broadcasting: counterparts are cut together."""
    given = [place for place, each in enumerate(node.args) if isinstance(each, Node)]
    left, right = (_padded(builder.tensor(node.args[place]), node.meta["val"].ndim) for place in given)
    name = operator_name(node)
    if name == "div" and not node.kwargs:
        inverse = builder.table.follow(right.atoms)  # x / y is zero where x is, whatever y is
        builder.ops.append(ChannelwiseOp(right.atoms, inverse, torch.reciprocal, keeps_zero=False))
        return combined(builder, node, left, Value(right.shape, inverse), operator.mul, absorbs_zero=True)
    evaluate = _applied(node, *given)
    return combined(builder, node, left, right, evaluate, absorbs_zero=name in PRODUCTS, adds=name in SUMS)


def choice(builder: GraphBuilder, node: Node, entry: Operator) -> Any:
    """Choose one of two values by a condition: a constant where both are the same one, whatever the condition says."""
    condition, *given = node.args if operator_name(node) == "where" else [node.args[i] for i in (1, 0, 2)]
    if len(given) != 2:
        raise Opaque("is used in an unusual way")
    shape = tuple(node.meta["val"].shape)
    where, *values = [
        _padded(builder.tensor(each), len(shape)) for each in (condition, *given) if isinstance(each, Node)
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


def accumulation(builder: GraphBuilder, node: Node, entry: Operator) -> Any:
    """Add slices of a tensor to those of another, by an index: the sums of a graph network over edges."""
    target, source = builder.tensor(node.args[0]), builder.tensor(node.args[3])
    dim: int = node.args[1] % len(target.shape)  # type: ignore[operator, assignment]
    if target.varies_along(dim) or source.varies_along(dim):
        raise Opaque("mixes them")
    # How often a constant is added depends on the index.
    return combined(builder, node, target, source, lambda left, right: torch.where(right == 0, left, torch.nan))


# --- what rules share ----------------------------------------------------------------------------------------------


def channelwise(
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
    """Combine two tensors of one rank value by value, with broadcasting; `shape` is the node's if it is not given."""
    outputs = _bound(builder, node, left, right)
    one, other = (atoms.ravel() for atoms in np.broadcast_arrays(left.atoms, right.atoms))
    builder.ops.append(BinaryOp(one, other, outputs.ravel(), evaluate, absorbs_zero, adds))
    return Value(tuple(node.meta["val"].shape if shape is None else shape), outputs)


def merged(builder: GraphBuilder, arrays: Sequence[IntArray]) -> IntArray:
    """Merge channels that stand in for each other over space or batch: one class, constant where all agree."""
    found = arrays[0]
    for array in arrays[1:]:
        builder.table.union(found, array)
        outputs = builder.table.follow(found)
        builder.ops.append(BinaryOp(found.ravel(), array.ravel(), outputs.ravel(), equal, False))
        found = outputs
    return found


def equal(left: Tensor, right: Tensor) -> Tensor:
    """Return the common value of two constants; NaN where they differ."""
    return torch.where(left == right, left, torch.nan)


def _applied(node: Node, *positions: int) -> Evaluate:
    """Return the node's own operator on constants in place of its tensors, which stand at these positions."""
    if len(positions) != sum(isinstance(each, Node) for each in (*node.args, *node.kwargs.values())):
        raise Opaque("reads further tensors")
    kinds = [node.args[position].meta["val"].dtype for position in positions]  # type: ignore[union-attr]

    def evaluate(*constants: Tensor) -> Tensor:
        args = list(node.args)
        for position, kind, values in zip(positions, kinds, constants, strict=True):
            args[position] = _as(kind, values.clone())  # type: ignore[call-overload]
        return _as(node.meta["val"].dtype, node.target(*args, **node.kwargs))  # type: ignore[operator]

    return evaluate


def _as(kind: torch.dtype, constants: Tensor) -> Tensor:
    """Return constants in a dtype whose arithmetic differs: integers wrap around, and casts to them truncate."""
    return constants if kind.is_floating_point else constants.to(kind)


def _bound(builder: GraphBuilder, node: Node, left: Value, right: Value) -> IntArray:
    """Tie the channels of two tensors that meet in `node`, and return those of the result."""
    for one, other in ((left, right), (right, left)):
        for dim in filter(one.varies_along, range(len(one.shape))):
            if other.shape[dim] != 1 and not other.varies_along(dim) and builder.differ_along(one, dim):
                shape = np.broadcast_shapes(one.atoms.shape, other.atoms.shape)
                builder.table.union(one.atoms, np.broadcast_to(other.atoms, shape))
            elif other.shape[dim] == 1 and other.atoms.size == 1:
                # Broadcast over the channels: a single channel of its own must not vanish.
                builder.table.pin(other.atoms, f"one of them is broadcast in {builder.place(node)}")
    # Only where both sides really have the channel: a broadcast side does not bind it.
    if left.atoms.shape == right.atoms.shape:
        builder.table.union(left.atoms, right.atoms)
        return builder.table.follow(left.atoms)
    narrow, wide = sorted((left, right), key=lambda value: value.atoms.size)
    if narrow.atoms.size > 1:
        sizes = zip(narrow.atoms.shape, wide.atoms.shape, strict=True)
        if all(size in (1, wider) for size, wider in sizes):
            builder.table.union(np.broadcast_to(narrow.atoms, wide.atoms.shape), wide.atoms)
        else:
            for value in (narrow, wide):
                builder.table.pin(value.atoms, "tensors with channels along different dimensions are combined")
    both = np.broadcast_arrays(left.atoms, right.atoms)
    return builder.table.follow(both[0] if left.atoms.size >= right.atoms.size else both[1])


def _padded(value: Value, rank: int) -> Value:
    missing = rank - len(value.shape)
    return Value((1,) * missing + value.shape, value.atoms.reshape((1,) * missing + value.atoms.shape))
