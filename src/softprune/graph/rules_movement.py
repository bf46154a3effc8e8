"""Rules for operators that only move data: they are run on the atoms, then checked for what they bind.

Sizes in forward() are Python numbers: torch.export cannot tell a literal from ``x.shape[1] // 2``. A slice, a split
into given sizes or an index is taken as literal and freezes its channels. A view that takes channels apart ties
them so that the result stays a rectangle, and is proved by a trial cut before anything relies on it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from softprune.graph.atoms import PAD
from softprune.graph.link import Linker, Value, operator_name, rule
from softprune.graph.modules import Select
from softprune.graph.records import Balance, Gather, Join, Map

RESHAPES = ["view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as"]
# fmt: off
MOVES = [
    "permute", "transpose", "t", "contiguous", "squeeze", "unsqueeze", "movedim", "swapaxes", "swapdims",
    "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "native_channel_shuffle", "flip", "roll",
    "expand", "expand_as", "repeat_interleave",
]
# fmt: on
# fmt: off
BINDS = [
    "slice", "narrow", "select", "split", "split_with_sizes", "tensor_split", "unbind", "index",
    "index_select", "repeat",
]
# fmt: on


def _move(linker: Linker, node: Node) -> Any:
    """Run the node's operator on its inputs' atoms."""
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    sources = [leaf for leaf in leaves if isinstance(leaf, Node)]
    values = [linker.value(source) for source in sources]
    if any(not isinstance(value, Value) for value in values):
        return None

    def call(*tensors: Tensor) -> Any:
        given = iter(tensors)
        filled = [next(given) if isinstance(leaf, Node) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(filled, spec)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    return linker.moved(node, call, values, lambda spread: spread)


def _unusual(linker: Linker, node: Node) -> Any:
    return linker.opaque(node, f"{node.target} in {linker.where(node)} is used in an unusual way")


def _bind_rectangle(linker: Linker, node: Node, value: Value) -> None:
    """Tie what a view took apart: the widest dimension may shrink, the others keep their sizes."""
    wide = [dim for dim, size in enumerate(value.atoms.shape) if size > 1]
    if len(wide) < 2:
        return
    widest = 1 if 1 in wide and len(wide) > 2 else max(wide, key=lambda dim: (value.atoms.shape[dim], -dim))
    others = tuple(dim for dim in wide if dim != widest)
    head = value.atoms
    for dim in others:
        head = head.take([0], axis=dim)
    linker.table.union(np.broadcast_to(head, value.atoms.shape), value.atoms)
    linker.suspects.append((value.atoms.ravel(), f"{node.target} in {linker.where(node)}"))


@rule(*RESHAPES)
def reshape(linker: Linker, node: Node) -> Any:
    output = _move(linker, node)
    if not isinstance(output, Value):
        return _unusual(linker, node)
    _bind_rectangle(linker, node, output)
    source = linker.value(node.args[0])
    sizes = node.args[1] if len(node.args) > 1 and isinstance(node.args[1], (list, tuple)) else []
    dims = [dim for dim, size in enumerate(output.atoms.shape) if size > 1]
    if source.atoms.size > 1 and any(dim < len(sizes) and sizes[dim] != -1 for dim in dims):
        linker.suspects.append((output.atoms.ravel(), f"{node.target} in {linker.where(node)}"))
    return output


@rule(*MOVES)
def move(linker: Linker, node: Node) -> Any:
    output = _move(linker, node)
    if not isinstance(output, Value):
        return _unusual(linker, node)
    if operator_name(node) in (
        "pixel_shuffle",
        "pixel_unshuffle",
        "channel_shuffle",
        "native_channel_shuffle",
    ):
        source = linker.value(node.args[0]).atoms
        groups = node.args[1]
        assert isinstance(groups, int)
        if operator_name(node) == "pixel_shuffle" and source.size > 1:
            blocks = source.reshape(-1, groups * groups)
            linker.table.union(blocks[:, :1], blocks)
        elif "channel" in operator_name(node) and source.size > 1:
            rows = source.reshape(groups, -1)
            linker.table.union(rows[:1], rows)
        else:
            _bind_rectangle(linker, node, output)
    return output


@rule("cat", "concat", "stack")
def concatenate(linker: Linker, node: Node) -> Any:
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    values = [linker.value(source) for source in node.args[0]]  # type: ignore[union-attr]
    output = _move(linker, node)
    if not isinstance(output, Value) or not isinstance(dim, int):
        return _unusual(linker, node)
    rank = len(output.shape)
    stacked = operator_name(node) == "stack"
    if stacked or output.along(dim % rank) is None:
        # Joined along another dimension than the channels': the pieces' channels are counterparts.
        first = values[0].atoms
        if any(value.atoms.shape != first.shape for value in values):
            return linker.opaque(
                node, f"{operator_name(node)} in {linker.where(node)} mixes different layouts"
            )
        for value in values[1:]:
            linker.table.union(first, value.atoms)
            outputs = linker.table.follow(first)
            linker.records.append(Join(first.ravel(), value.atoms.ravel(), outputs.ravel(), _equal, False))
            first = outputs
        return Value(output.shape, np.expand_dims(first, dim % rank) if stacked else first)
    return output


def _equal(left: Tensor, right: Tensor) -> Tensor:
    return torch.where(left == right, left, torch.nan)


@rule("chunk")
def chunk(linker: Linker, node: Node) -> Any:
    outputs = _move(linker, node)
    if outputs is None:
        return _unusual(linker, node)
    dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    source = linker.value(node.args[0])
    assert isinstance(dim, int)
    if source.varies_along(dim % len(source.shape)):
        pieces = tuple(piece.atoms.ravel() for piece in outputs)
        if len({len(piece) for piece in pieces}) > 1:
            linker.table.pin(source.atoms, f"chunk in {linker.where(node)} cuts them into unequal pieces")
        else:
            linker.balances.append(Balance(pieces))
    return outputs


@rule(*BINDS)
def bind(linker: Linker, node: Node) -> Any:
    """Movements whose arguments fix the channels they touch."""
    if operator_name(node) in ("index", "index_select"):
        return _index(linker, node)
    output = _move(linker, node)
    if output is None:
        return _unusual(linker, node)
    source = linker.value(node.args[0])
    whole = isinstance(output, Value) and output.shape == source.shape
    touched = source.atoms.size > 1 and not whole
    if touched and not _same_channels(source, output):
        linker.table.pin(
            source.atoms, f"{operator_name(node)} in {linker.where(node)} takes them apart at fixed positions"
        )
    return output


def _same_channels(source: Value, output: Any) -> bool:
    """Whether every piece still has all channels (the movement was along another dimension)."""
    pieces = output if isinstance(output, list) else [output]
    return all(
        isinstance(piece, Value)
        and piece.atoms.size == source.atoms.size
        and np.array_equal(piece.atoms.ravel(), source.atoms.ravel())
        for piece in pieces
    )


def _index(linker: Linker, node: Node) -> Any:
    """Constant indices along channels: our own `Select` may be shortened, any other index freezes."""
    if operator_name(node) == "index_select":
        dim, given = node.args[1], node.args[2]
    else:
        indices = node.args[1]
        assert isinstance(indices, (list, tuple))
        places = [position for position, index in enumerate(indices) if index is not None]
        if len(places) != 1:
            return _unusual(linker, node)
        dim, given = places[0], indices[places[0]]
    name = linker.parameter_name(given)
    source = linker.value(node.args[0])
    assert isinstance(dim, int)
    if name is None or not isinstance(source, Value) or linker.tensor(name).ndim != 1:
        return _unusual(linker, node)
    atoms = source.along(dim)
    if atoms is None:
        return _unusual(linker, node)
    index = linker.tensor(name).detach().cpu().numpy()
    shape = tuple(node.meta["val"].shape)
    layout = [1] * len(shape)
    layout[dim] = len(index)
    _, owner = linker.module_of(node)
    if isinstance(linker.model.get_submodule(owner), Select) and dim == 1:
        outputs = linker.table.fresh(len(index))
        linker.records.append(Gather(owner, atoms[index], atoms, outputs))
        return Value(shape, outputs.reshape(layout))
    linker.table.pin(atoms, f"a constant index in {linker.where(node)} picks them by position")
    return Value(shape, atoms[index].reshape(layout) if source.atoms.size > 1 else source.atoms)


@rule("pad", "constant_pad_nd")
def pad(linker: Linker, node: Node) -> Any:
    value = linker.value(node.args[0])
    pads, rank = node.args[1], len(value.shape)
    assert isinstance(pads, (list, tuple))
    mode = (
        node.args[2]
        if len(node.args) > 2 and isinstance(node.args[2], str)
        else node.kwargs.get("mode", "constant")
    )
    fill = (
        node.args[-1]
        if len(node.args) > 2 and not isinstance(node.args[-1], str)
        else node.kwargs.get("value")
    )
    before = [0] * rank
    after = [0] * rank
    for place in range(len(pads) // 2):
        before[rank - 1 - place], after[rank - 1 - place] = pads[2 * place], pads[2 * place + 1]  # type: ignore[assignment]
    varying = [dim for dim in range(rank) if value.varies_along(dim)]
    outer = [dim for dim in varying if before[dim] or after[dim]]
    atoms = value.atoms
    if outer:
        if mode != "constant" or fill not in (None, 0, 0.0) or min(before[d] for d in outer) < 0:
            return linker.opaque(node, f"padding of channels in {linker.where(node)} is not with zeros")
        widths = [(before[dim], after[dim]) if dim in outer else (0, 0) for dim in range(rank)]
        atoms = np.pad(atoms, widths, constant_values=PAD)
    over_space = any(before[dim] or after[dim] for dim in range(rank) if dim not in outer)
    shape = tuple(node.meta["val"].shape)
    if not over_space:
        return Value(shape, atoms)
    outputs = linker.table.follow(atoms)
    zeros = mode != "constant" or fill in (None, 0, 0.0)
    same = mode in ("reflect", "replicate", "circular")
    linker.records.append(Map(atoms, outputs, _same if same else None, keeps_zero=zeros))
    return Value(shape, outputs)


def _same(constants: Tensor) -> Tensor:
    return constants
