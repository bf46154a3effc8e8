"""Rules for operators that only rearrange data: views, permutations, shuffles.

They run on the atoms themselves. Sizes in forward() are Python numbers: torch.export cannot tell a literal from
``x.shape[1] // 2``. A view that could be written in terms of the width ties its channels so that the pieces stay equal,
and its size is *unproven* until a trial cut has shown that it follows the width.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from softprune.graph.builder import GraphBuilder, Value
from softprune.graph.channels import IntArray
from softprune.graph.ops import BinaryOp, ChannelwiseOp, identity
from softprune.graph.rules.elementwise import differ_along, equal
from softprune.graph.rules.registry import argument, operator_name, rule


def run_on_atoms(builder: GraphBuilder, node: Node, tensors: int = 1) -> Any:
    """Run the node's operator on its inputs' atoms. Raise a TypeError where it reads others beside its `tensors`."""
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    sources = [leaf for leaf in leaves if isinstance(leaf, Node)]
    values = [builder.value(source) for source in sources]
    if len(values) != tensors or any(not isinstance(value, Value) for value in values):
        raise TypeError("an argument that is usually a number is a tensor")

    def call(*atoms: Tensor) -> Any:
        given = iter(atoms)
        filled = [next(given) if isinstance(leaf, Node) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(filled, spec)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    return builder.moved(call, values)


def merge_counterparts(builder: GraphBuilder, arrays: Sequence[IntArray]) -> IntArray:
    """Channels that stand in for each other over space or batch: one class, constant where all agree."""
    merged = arrays[0]
    for array in arrays[1:]:
        builder.table.union(merged, array)
        outputs = builder.table.follow(merged)
        builder.ops.append(BinaryOp(merged.ravel(), array.ravel(), outputs.ravel(), equal, False))
        merged = outputs
    return merged


def _bind_rectangle(builder: GraphBuilder, node: Node, value: Value) -> Value:
    """Tie what a view took apart: the widest dimension may shrink, the others keep their sizes."""
    if value.shape[:1] == (builder.batch,) and value.varies_along(0) and not differ_along(builder, value, 0):
        samples = np.split(value.atoms, builder.batch)  # they had one dimension with heads of attention
        value = Value(value.shape, merge_counterparts(builder, samples))
    wide = [dim for dim, size in enumerate(value.atoms.shape) if size > 1]
    if len(wide) < 2:
        return value
    repeated = wide[0] == 0 and np.unique(value.atoms).size < value.atoms.size  # in every sample
    widest = 1 if 1 in wide and len(wide) > 2 else max(wide[repeated:], key=lambda dim: (value.atoms.shape[dim], -dim))
    head = value.atoms
    for dim in wide:
        if dim != widest:
            head = head.take([0], axis=dim)
    builder.table.union(np.broadcast_to(head, value.atoms.shape), value.atoms)
    builder.add_unproven_size(node, value.atoms)
    return value


@rule("reshape")
def reshape(builder: GraphBuilder, node: Node) -> Any:
    output = _bind_rectangle(builder, node, run_on_atoms(builder, node))
    sizes = node.args[1] if len(node.args) > 1 and isinstance(node.args[1], (list, tuple)) else []
    if operator_name(node) == "unflatten":
        rank = node.args[0].meta["val"].ndim  # type: ignore[union-attr]
        sizes = [-1] * (argument(node, 1, "dim") % rank) + list(argument(node, 2, "sizes"))
    _check_sizes(builder, node, output, sizes)
    return output


@rule("as_another")
def as_another(builder: GraphBuilder, node: Node) -> Any:
    """In the shape of a second tensor: channels that have the same place in both go together."""
    output = run_on_atoms(builder, node, tensors=2)
    source, other = builder.value(node.args[0]), builder.value(node.args[1])
    if operator_name(node) != "expand_as":
        output = _bind_rectangle(builder, node, output)
    elif source.atoms.size == 1 and _is_stretched(source, other):
        # One channel for all of them, which must not vanish.
        builder.table.pin(source.atoms, f"one of them is broadcast in {builder.where(node)}")
        stretched = builder.table.follow(other.atoms)
        builder.ops.append(ChannelwiseOp(np.full_like(stretched, source.atoms.item()), stretched, identity))
        return Value(other.shape, stretched)
    builder.table.union(output.atoms, other.atoms)
    return output


def _is_stretched(source: Value, other: Value) -> bool:
    """Whether `source` has size 1, or no dimension, wherever the channels of `other` are."""
    missing = len(other.shape) - len(source.shape)
    shape = (1,) * missing + source.shape
    return all(shape[dim] == 1 for dim in range(len(shape)) if other.varies_along(dim))


@rule("expand")
def expand(builder: GraphBuilder, node: Node) -> Any:
    output = run_on_atoms(builder, node)
    _check_sizes(builder, node, output, node.args[1])  # type: ignore[arg-type]
    return output


def _check_sizes(builder: GraphBuilder, node: Node, output: Value, sizes: Sequence[Any]) -> None:
    """An explicit size where the channels are may be a literal."""
    if any(output.varies_along(dim) and size != -1 for dim, size in enumerate(sizes)):
        builder.add_unproven_size(node, output.atoms)


@rule("move")
def move(builder: GraphBuilder, node: Node) -> Any:
    return run_on_atoms(builder, node)


@rule("squeeze")
def squeeze(builder: GraphBuilder, node: Node) -> Any:
    output = run_on_atoms(builder, node)
    if argument(node, 1, "dim") is None:
        for dim in range(len(output.shape)):
            if output.varies_along(dim):
                reason = f"squeeze() without a dimension in {builder.where(node)} would drop that of a single channel"
                builder.table.pin(output.atoms.take([0, 1], axis=dim), reason)
    return output


@rule("pixel_shuffle")
def pixel_shuffle(builder: GraphBuilder, node: Node) -> Any:
    """Each output channel is a block of input channels, spread over space."""
    value, factor = builder.value(node.args[0]), node.args[1]
    assert isinstance(factor, int)
    if value.along(1) is None:
        return builder.unusual(node)
    blocks = value.along(1).reshape(-1, factor * factor)
    outputs = merge_counterparts(builder, list(blocks.T))
    return Value.with_channels(node.meta["val"].shape, 1, outputs)


@rule("patches")
def patches(builder: GraphBuilder, node: Node) -> Any:
    """unfold gives every channel once per position of a patch; fold adds them up again."""
    value, folds = builder.value(node.args[0]), operator_name(node) == "col2im"
    size: Any = node.args[2 if folds else 1]
    channels = value.along(1)
    if channels is None or len(value.shape) != (3 if folds else 4):
        return builder.unusual(node)
    if folds:
        channels = merge_counterparts(builder, list(channels.reshape(-1, math.prod(size)).T))
    outputs = builder.table.follow(channels)
    unpadded = not folds and not any(argument(node, 3, "padding", (0,)))
    builder.ops.append(ChannelwiseOp(channels, outputs, identity if unpadded else None))
    repeated = outputs if folds else np.repeat(outputs, math.prod(size))
    return Value.with_channels(node.meta["val"].shape, 1, repeated)


@rule("channel_shuffle")
def channel_shuffle(builder: GraphBuilder, node: Node) -> Any:
    output = run_on_atoms(builder, node)
    value, groups = builder.value(node.args[0]), node.args[1]
    assert isinstance(groups, int)
    if value.along(1) is None:
        return builder.unusual(node)
    rows = value.along(1).reshape(groups, -1)
    builder.table.union(rows[:1], rows)
    return output
