"""Rules of operators that move data: views, permutations, pieces, concatenation, padding, indices.

The operators run on arrays of atoms. Sizes in forward() are recorded as numbers, so a literal cannot be distinguished
from ``x.shape[1] // 2``. For sizes that may follow the width (views, equal pieces), channels are tied so that pieces
stay equal, and the size is *unproven* until a trial cut shows that it does. Sizes that can only be literals are pinned.
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from softprune.graph.builder import GraphBuilder, Opaque, Operator, Value, argument, operator_name
from softprune.graph.channels import PAD, EqualWidths, IntArray, SelectOp, identity
from softprune.graph.modules import Select


def movement(builder: GraphBuilder, node: Node, entry: Operator) -> Any:
    """Run the operator on the atoms of its input; raise Opaque if it reads further tensors."""
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    values = [builder.tensor(leaf) for leaf in leaves if isinstance(leaf, Node)]
    if len(values) != 1:
        raise Opaque("reads a tensor where a number is expected")

    def call(*atoms: Tensor) -> Any:
        given = iter(atoms)
        filled = [next(given) if isinstance(leaf, Node) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(filled, spec)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    return builder.moved(node, values, call)


# --- views ---------------------------------------------------------------------------------------------------------


def view(builder: GraphBuilder, node: Node, entry: Operator) -> Any:
    """Split or merge dimensions."""
    output = _rectangle(builder, node, movement(builder, node, entry))
    sizes = node.args[1] if len(node.args) > 1 and isinstance(node.args[1], (list, tuple)) else []
    if operator_name(node) == "unflatten":
        rank = node.args[0].meta["val"].ndim  # type: ignore[union-attr]
        sizes = [-1] * (node.args[1] % rank) + [*node.args[2]]  # type: ignore[operator, misc]
    return _with_sizes(builder, node, output, sizes)


def expansion(builder: GraphBuilder, node: Node, entry: Operator) -> Any:
    """Repeat a dimension of size 1."""
    return _with_sizes(builder, node, movement(builder, node, entry), node.args[1])  # type: ignore[arg-type]


def _rectangle(builder: GraphBuilder, node: Node, value: Value) -> Value:
    """Tie the channels that a view has split: only the widest dimension may shrink."""
    if value.shape[:1] == (builder.batch,) and value.varies_along(0) and not builder.differ_along(value, 0):
        samples = np.split(value.atoms, builder.batch)  # the batch was merged with attention heads
        value = Value(value.shape, builder.merged(samples))
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


def _with_sizes(builder: GraphBuilder, node: Node, output: Value, sizes: Sequence[Any]) -> Value:
    """Record an unproven size if `sizes` has an explicit size along the channels; return `output`."""
    if any(output.varies_along(dim) and size != -1 for dim, size in enumerate(sizes)):
        builder.add_unproven_size(node, output.atoms)
    return output


def squeeze(builder: GraphBuilder, node: Node, entry: Operator) -> Any:
    """Drop dimensions of size 1."""
    output = movement(builder, node, entry)
    if argument(node, 1) is None:
        for dim in range(len(output.shape)):
            if output.varies_along(dim):
                reason = builder.reason(node, "has no dim argument and would drop the dimension of a single channel")
                builder.table.pin(output.atoms.take([0, 1], axis=dim), reason)
    return output


def pixel_shuffle(builder: GraphBuilder, node: Node, entry: Operator) -> Any:
    """Move blocks of channels to space."""
    factor: Any = node.args[1]
    blocks = builder.tensor(node.args[0]).along(1).reshape(-1, factor * factor)
    return Value.with_channels(node.meta["val"].shape, 1, builder.merged(list(blocks.T)))


# --- pieces --------------------------------------------------------------------------------------------------------


def split(builder: GraphBuilder, node: Node, entry: Operator) -> Any:
    """Split a tensor into pieces."""
    outputs = movement(builder, node, entry)
    source = builder.tensor(node.args[0])
    pieces = [piece.atoms.ravel() for piece in outputs]
    along = source.varies_along(argument(node, 2, 0) % len(source.shape))
    if along and len({len(piece) for piece in pieces}) > 1:
        builder.table.pin(np.concatenate(pieces), builder.reason(node, "splits them into unequal pieces"))
    elif along:
        builder.graph.equal_widths.append(EqualWidths(tuple(pieces), builder.module_name(node)))
        # chunk has a number of pieces, which works for any width. The sizes of split may be literals.
        if operator_name(node) != "chunk":
            builder.add_unproven_size(node, source.atoms)
    return outputs


def piece(builder: GraphBuilder, node: Node, entry: Operator) -> Any:
    """Take a slice. Equal pieces may follow the width; the bounds of others are assumed to be literals."""
    output = movement(builder, node, entry)
    source = builder.tensor(node.args[0])
    dim = argument(node, 1, 0) % len(source.shape)
    if source.varies_along(dim) and output.shape != source.shape:
        atoms, first = source.along(dim), node.args[0]
        assert isinstance(first, Node)
        if first not in builder.sliced:
            builder.sliced.add(first)
            slices = [_bounds(user, dim, len(atoms)) for user in first.users if operator_name(user) == "slice"]
            _bind_slices(builder, node, atoms, slices)
    return output


def _bind_slices(builder: GraphBuilder, node: Node, atoms: IntArray, slices: Sequence[tuple[int, int] | None]) -> None:
    """Relate the channels of all slices of a tensor."""
    known = [bounds for bounds in slices if bounds is not None]
    reason = builder.reason(node, "slices channels at hard-coded indices")
    if len(known) < len(slices):
        builder.table.pin(atoms, reason)
        return
    edges = sorted({0, len(atoms), *(edge for bounds in known for edge in bounds)})
    pieces = np.split(atoms, edges[1:-1])
    if len({len(piece) for piece in pieces}) == 1:
        builder.graph.equal_widths.append(EqualWidths(tuple(pieces), builder.module_name(node)))
        builder.add_unproven_size(node, atoms)
    else:
        last = max(end if end < len(atoms) else start for start, end in known)
        builder.table.pin(atoms[:last], reason)
        builder.add_unproven_size(node, atoms, "slices channels at a share of their number")  # or at a literal


def _bounds(node: Node, dim: int, width: int) -> tuple[int, int] | None:
    """Return (start, end) of a slice along `dim`; None if it is not a plain range."""
    if argument(node, 1, 0) % len(node.meta["val"].shape) != dim:
        return 0, width
    start, end = argument(node, 2, 0) or 0, argument(node, 3)
    end = sys.maxsize if end is None else end
    plain = isinstance(start, int) and isinstance(end, int) and min(start, end) >= 0
    return (start, min(end, width)) if plain and argument(node, 4, 1) == 1 else None


def positions(builder: GraphBuilder, node: Node, entry: Operator) -> Any:
    """Move or select entries by position, which pins channels along that dimension."""
    output = movement(builder, node, entry)
    source = builder.tensor(node.args[0])
    pieces = output if isinstance(output, list) else [output]
    # Along other dimensions, every piece still has all channels.
    whole = all(np.array_equal(piece.atoms.ravel(), source.atoms.ravel()) for piece in pieces)
    if source.atoms.size > 1 and not whole:
        builder.table.pin(source.atoms, builder.reason(node, "selects channels at hard-coded indices"))
    return output


def indexing(builder: GraphBuilder, node: Node, entry: Operator) -> Any:
    """Select by an index, which freezes channels along that dimension, except for our own `Select`."""
    source = builder.tensor(node.args[0])
    selects = operator_name(node) == "index_select"
    if selects and isinstance(builder.module_of(node), Select):
        return _selected(builder, node, source)
    given: Any = [node.args[2]] if selects else node.args[1]
    places: Any = [node.args[1] % len(source.shape)] if selects else range(len(given))  # type: ignore[operator]
    dims = [dim for dim, each in zip(places, given, strict=True) if each is not None]
    if any(each is not None and each.meta["val"].dtype in (torch.bool, torch.uint8) for each in given):
        raise Opaque("is indexed by a mask, whose values determine the size of the result")
    if any(source.varies_along(dim) for dim in dims):
        raise Opaque("selects channels by their positions")

    def pick_first(atoms: Tensor) -> Any:  # any position will do, since the channels are the same everywhere
        args, kwargs = map_arg((node.args, node.kwargs), lambda each: torch.zeros(each.meta["val"].shape).long())
        return node.target(atoms, *args[1:], **kwargs)  # type: ignore[operator]

    return builder.moved(node, [source], pick_first)


def _selected(builder: GraphBuilder, node: Node, source: Value) -> Any:
    """Return the channels selected by a `Select` of an earlier cut."""
    name, atoms = builder.module_name(node), source.along(1)
    chosen = builder.tensors[f"{name}.index"].cpu().numpy()
    if len(np.unique(atoms)) < len(atoms):  # the output of an operator without a rule has a single atom
        raise Opaque("selects channels by their positions")
    builder.answer_for(node)
    outputs = builder.table.fresh(len(chosen))
    builder.graph.ops.append(SelectOp(name, atoms[chosen], atoms, outputs))
    return Value.with_channels(node.meta["val"].shape, 1, outputs)


# --- concatenation and padding -------------------------------------------------------------------------------------


def concatenation(builder: GraphBuilder, node: Node, entry: Operator) -> Any:
    """Concatenate or stack tensors along a dimension."""
    values = [builder.tensor(source) for source in node.args[0]]  # type: ignore[union-attr]
    shape, stacked = tuple(node.meta["val"].shape), operator_name(node) == "stack"
    place = argument(node, 1, 0) % len(shape)
    if any(len(value.shape) + stacked != len(shape) for value in values):  # cat accepts empty 1-D tensors
        raise Opaque("is used in an unusual way")
    elsewhere = stacked or any(
        value.varies_along(other) for value in values for other in range(len(value.atoms.shape)) if other != place
    )
    if not elsewhere:
        rows = [np.broadcast_to(value.atoms.ravel(), (value.shape[place],)) for value in values]
        zeros, others = [row for row in rows if (row == PAD).all()], [row for row in rows if (row != PAD).any()]
        if zeros and others:
            remedy = f"x.new_zeros(x.shape[0], {len(zeros[0])}, ...), or torch.zeros_like(x) for the same number"
            builder.add_unproven_size(node, np.concatenate(others), _zeros_depend(remedy))
        return Value.with_channels(shape, place, np.concatenate(rows))
    # Joined along a dimension other than the channels, so the channels of the pieces correspond to each other.
    arrays = [value.atoms for value in values]
    along = not stacked and any(value.varies_along(place) for value in values)
    if along or any(array.shape != arrays[0].shape for array in arrays):
        raise Opaque("joins tensors with different layouts")
    outputs = builder.merged(arrays)
    return Value(shape, np.expand_dims(outputs, place) if stacked else outputs)


def _zeros_depend(remedy: str) -> str:
    """Return the reason for zero channels whose number depends on the width, unless their size is a literal."""
    return f"adds zero channels whose number depends on theirs; write a literal, {remedy}"


def padding(builder: GraphBuilder, node: Node, entry: Operator) -> Any:
    """Pad space or channels."""
    value = builder.tensor(node.args[0])
    pads: Any = node.args[1]
    rank = len(value.shape)
    named = operator_name(node) == "pad"  # pad(x, pads, mode, value); constant_pad_nd(x, pads, value)
    mode = argument(node, 2, "constant") if named else "constant"
    zeros = mode == "constant" and argument(node, 3 if named else 2) in (None, 0, 0.0)
    around = [(0, 0)] * (rank - len(pads) // 2) + [*zip(pads[::2], pads[1::2], strict=True)][::-1]
    outer = [dim for dim in range(rank) if value.varies_along(dim) and any(around[dim])]
    atoms = value.atoms
    if outer:
        if not zeros or min(min(around[dim]) for dim in outer) < 0:
            raise Opaque("pads channels with values other than zero")
        builder.add_unproven_size(node, atoms, _zeros_depend(f"F.pad(x, {tuple(pads)})"))
        atoms = np.pad(atoms, [around[dim] if dim in outer else (0, 0) for dim in range(rank)], constant_values=PAD)
    padded = Value(tuple(node.meta["val"].shape), atoms)
    if not any(any(around[dim]) for dim in range(rank) if dim not in outer):
        return padded
    same = mode in ("reflect", "replicate", "circular")
    return builder.channelwise(node, padded, identity if same else None, keeps_zero=zeros or mode != "constant")
