"""Rules for operators that join tensors, take them apart, pick from them or pad them along channels.

Equal pieces may follow the width: they stay equal, and an explicit size is *unproven* until a trial cut. What can only
be a literal (uneven pieces, single positions, an index) is pinned.
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from softprune.graph.builder import GraphBuilder, Value
from softprune.graph.channels import PAD, IntArray
from softprune.graph.modules import Select
from softprune.graph.ops import ChannelwiseOp, EqualWidths, SelectOp, identity
from softprune.graph.rules.registry import OPERATORS, argument, operator_name, rule
from softprune.graph.rules.views import merge_counterparts, run_on_atoms

STACKS = {"vstack": 0, "row_stack": 0, "hstack": 1, "column_stack": 1, "dstack": 2}
"""Name of a concatenation -> the dimension along which it joins tensors that have more dimensions than that."""


@rule("concatenate")
def concatenate(builder: GraphBuilder, node: Node) -> Any:
    dim = STACKS.get(operator_name(node), argument(node, 1, "dim", 0))
    values = [builder.value(source) for source in node.args[0]]  # type: ignore[union-attr]
    if any(not isinstance(value, Value) for value in values):
        return builder.unusual(node)
    if operator_name(node) in STACKS and any(len(value.shape) <= max(dim, 1) for value in values):
        return builder.unusual(node)  # dimensions are added first
    shape = tuple(node.meta["val"].shape)
    stacked = operator_name(node) == "stack"
    place = dim % len(shape)
    elsewhere = stacked or any(
        value.varies_along(other) for value in values for other in range(len(value.atoms.shape)) if other != place
    )
    if not elsewhere:
        values = [_as_wide(builder, value, values) for value in values]
        rows = [np.broadcast_to(value.atoms.ravel(), (value.shape[place],)) for value in values]
        zeros, others = [row for row in rows if (row == PAD).all()], [row for row in rows if (row != PAD).any()]
        if zeros and others:
            remedy = f"x.new_zeros(x.shape[0], {len(zeros[0])}, ...)"
            builder.add_unproven_size(node, np.concatenate(others), _zeros_depend(remedy))
        return Value.with_channels(shape, place, np.concatenate(rows))
    # Joined along another dimension than the channels': the pieces' channels are counterparts.
    arrays = [value.atoms for value in values]
    along = not stacked and any(value.varies_along(place) for value in values)
    if along or any(array.shape != arrays[0].shape for array in arrays):
        return builder.opaque(node, f"{operator_name(node)} in {builder.where(node)} layers different layouts")
    outputs = merge_counterparts(builder, arrays)
    return Value(shape, np.expand_dims(outputs, place) if stacked else outputs)


def _as_wide(builder: GraphBuilder, value: Value, beside: Sequence[Value]) -> Value:
    """Return zeros that are as wide as a tensor beside them as following it, where a literal size has failed."""
    other = next((each for each in beside if each.shape == value.shape and (each.atoms != PAD).all()), None)
    if other is None or (value.atoms != PAD).any():
        return value
    builder.zeros_may_follow = True
    if not builder.zeros_follow:
        return value
    atoms = builder.table.follow(other.atoms)
    builder.ops.append(ChannelwiseOp(np.full_like(atoms, PAD), atoms, identity))
    return Value(value.shape, atoms)


@rule("chunk")
@rule("split")
def split(builder: GraphBuilder, node: Node) -> Any:
    outputs = run_on_atoms(builder, node)
    source = builder.value(node.args[0])
    pieces = [piece.atoms.ravel() for piece in outputs]
    along = source.varies_along(argument(node, 2, "dim", 0) % len(source.shape))
    if along and len({len(piece) for piece in pieces}) > 1:
        reason = f"{operator_name(node)} in {builder.where(node)} cuts them into unequal pieces"
        builder.table.pin(np.concatenate(pieces), reason)
    elif along:
        builder.equal_widths.append(EqualWidths(tuple(pieces)))
        # A number of pieces holds for any width; their sizes may be literals.
        if OPERATORS[operator_name(node)].kind == "split":
            builder.add_unproven_size(node, source.atoms)
    return outputs


@rule("slice")
def take_slice(builder: GraphBuilder, node: Node) -> Any:
    output = run_on_atoms(builder, node)
    source, dim = builder.value(node.args[0]), argument(node, 1, "dim", 0)
    dim %= len(source.shape)
    if source.varies_along(dim) and output.shape != source.shape:
        atoms = source.along(dim)
        if atoms is None:
            return builder.unusual(node)
        _bind_slices(builder, node, dim, atoms)
    return output


def _bind_slices(builder: GraphBuilder, node: Node, dim: int, atoms: IntArray) -> None:
    """Slices of one tensor: equal pieces may follow the width, others are literal up to their last bound."""
    first, width = node.args[0], len(atoms)
    assert isinstance(first, Node)
    if first in builder.sliced:
        return
    builder.sliced.add(first)
    slices = [_bounds(user, dim, width) for user in first.users if operator_name(user) in ("slice", "narrow")]
    known = [bounds for bounds in slices if bounds is not None]
    reason = f"{operator_name(node)} in {builder.where(node)} takes them apart at fixed positions"
    if len(known) < len(slices):
        builder.table.pin(atoms, reason)
        return
    edges = sorted({0, width, *(edge for start, end, _ in known for edge in (start, end))})
    pieces = np.split(atoms, edges[1:-1])
    if len({len(piece) for piece in pieces}) == 1:
        builder.equal_widths.append(EqualWidths(tuple(pieces)))
        builder.add_unproven_size(node, atoms)
    else:
        last = max(end if end < width or strict else start for start, end, strict in known)
        builder.table.pin(atoms[:last], reason)


def _bounds(node: Node, dim: int, width: int) -> tuple[int, int, bool] | None:
    """(start, end, whether it must reach the end) of a slice along `dim`; None if it is no range from the front."""
    if argument(node, 1, "dim", 0) % len(node.meta["val"].shape) != dim:
        return 0, width, False
    start = argument(node, 2, "start", 0) or 0
    if operator_name(node) == "narrow":
        length = argument(node, 3, "length")
        plain = isinstance(start, int) and isinstance(length, int) and start >= 0
        return (start, start + length, True) if plain else None
    end = argument(node, 3, "end")
    end = sys.maxsize if end is None else end
    plain = isinstance(start, int) and isinstance(end, int) and min(start, end) >= 0
    return (start, min(end, width), False) if plain and argument(node, 4, "step", 1) == 1 else None


@rule("pick")
def pick(builder: GraphBuilder, node: Node) -> Any:
    """Movements by position: what they touch keeps its place."""
    output = run_on_atoms(builder, node)
    source = builder.value(node.args[0])
    pieces = output if isinstance(output, list) else [output]
    # Where it moves along another dimension, every piece still has all channels.
    whole = all(np.array_equal(piece.atoms.ravel(), source.atoms.ravel()) for piece in pieces)
    if source.atoms.size > 1 and not whole:
        reason = f"{operator_name(node)} in {builder.where(node)} takes them apart at fixed positions"
        builder.table.pin(source.atoms, reason)
    return output


@rule("index")
def index(builder: GraphBuilder, node: Node) -> Any:
    """An index along channels freezes them, but our own `Select` may be shortened; along space or batch they pass."""
    source = builder.value(node.args[0])
    _, owner = builder.provenance.module_of(node)
    selects = operator_name(node) == "index_select"
    if selects and isinstance(builder.provenance.module(owner), Select):
        return _select(builder, node, owner, source)
    given: Any = [node.args[2]] if selects else node.args[1]
    dims = [node.args[1] % len(source.shape)] if selects else range(len(given))  # type: ignore[operator]
    dims = [dim for dim, each in zip(dims, given, strict=True) if each is not None]
    if any(each is not None and each.meta["val"].dtype in (torch.bool, torch.uint8) for each in given):
        return builder.opaque(node, f"a mask as an index in {builder.where(node)} picks as many as its values say")
    if any(source.varies_along(dim) for dim in dims):
        return builder.opaque(node, f"an index in {builder.where(node)} picks them by position")

    def pick_first(atoms: Tensor) -> Any:  # any position, since the channels are the same everywhere
        args, kwargs = map_arg((node.args, node.kwargs), lambda each: torch.zeros(each.meta["val"].shape).long())
        return node.target(atoms, *args[1:], **kwargs)  # type: ignore[operator]

    return builder.moved(pick_first, [source])


def _select(builder: GraphBuilder, node: Node, owner: str, source: Value) -> Any:
    chosen = builder.provenance.tensor(f"{owner}.index").cpu().numpy()
    atoms = source.along(1)
    assert atoms is not None
    if len(np.unique(atoms)) < len(atoms):  # an operator without a rule gives them, all of them one
        return builder.opaque(node, f"an index in {builder.where(node)} picks them by position")
    builder.answer_for(node)
    outputs = builder.table.fresh(len(chosen))
    builder.ops.append(SelectOp(owner, atoms[chosen], atoms, outputs))
    return Value.with_channels(node.meta["val"].shape, 1, outputs)


def _zeros_depend(remedy: str) -> str:
    """Say that zero channels, added to others, are as many as those leave; the sizes may be literals as well."""
    return f"adds zero channels whose number depends on theirs; write a literal, {remedy}"


@rule("pad")
def pad(builder: GraphBuilder, node: Node) -> Any:
    value = builder.value(node.args[0])
    pads, rank = node.args[1], len(value.shape)
    assert isinstance(pads, (list, tuple))
    named = operator_name(node) == "pad"  # pad(x, pads, mode, value); constant_pad_nd(x, pads, value)
    mode = argument(node, 2, "mode", "constant") if named else "constant"
    fill = argument(node, 3 if named else 2, "value")
    before = [0] * rank
    after = [0] * rank
    for place in range(len(pads) // 2):
        before[rank - 1 - place], after[rank - 1 - place] = pads[2 * place], pads[2 * place + 1]  # type: ignore[assignment]
    varying = [dim for dim in range(rank) if value.varies_along(dim)]
    outer = [dim for dim in varying if before[dim] or after[dim]]
    atoms = value.atoms
    if outer:
        if mode != "constant" or fill not in (None, 0, 0.0) or min(before[d] for d in outer) < 0:
            return builder.opaque(node, f"padding of channels in {builder.where(node)} is not with zeros")
        widths = [(before[dim], after[dim]) if dim in outer else (0, 0) for dim in range(rank)]
        builder.add_unproven_size(node, atoms, _zeros_depend(f"F.pad(x, {tuple(pads)})"))
        atoms = np.pad(atoms, widths, constant_values=PAD)
    over_space = any(before[dim] or after[dim] for dim in range(rank) if dim not in outer)
    shape = tuple(node.meta["val"].shape)
    if not over_space:
        return Value(shape, atoms)
    outputs = builder.table.follow(atoms)
    zeros = mode != "constant" or fill in (None, 0, 0.0)
    same = mode in ("reflect", "replicate", "circular")
    builder.ops.append(ChannelwiseOp(atoms, outputs, identity if same else None, keeps_zero=zeros))
    return Value(shape, outputs)
