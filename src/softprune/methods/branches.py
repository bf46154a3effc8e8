"""Residual branches of a network, read from its channel graph."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from softprune.graph import ChannelGraph
from softprune.graph.channels import IntArray
from softprune.graph.ops import BinaryOp, ChannelwiseOp, ConstantOp, LayerCall, LayerOp, SelectOp

_DATA = 1
"""The bit of what depends on the network's input, as against constants and parameters."""


@dataclass(frozen=True)
class Branch:
    """What one addition adds to the stream."""

    last: str
    """The last BatchNorm that every path of the branch passes: silent, it silences the branch."""
    norms: tuple[str, ...]
    """All masked BatchNorms that stand in the branch alone, in the order of execution, up to `last`."""


def residual_branches(graph: ChannelGraph) -> dict[str, Branch]:
    """The branches that an addition joins to a shortcut, by their last BatchNorm, among the sites of `graph`.

    Of the two sides of an addition, the branch is the one with more BatchNorms that the other lacks. A branch with
    no BatchNorm on all of its paths is not among them, nor is one that shares its last BatchNorm with another.
    """
    bits = {site.name: 2 << number for number, site in enumerate(graph.sites)}
    order = {name: number for number, name in enumerate(_executed(graph, bits))}
    # Per atom: sites on some path from the input, and sites on every path.
    some = np.full(len(graph.classes), _DATA, dtype=object)
    every = np.zeros(len(graph.classes), dtype=object)
    for loose in graph.free_parameters:
        some[loose.atoms] = 0
    branches: dict[str, Branch] = {}
    for record in graph.ops:
        if isinstance(record, LayerCall):
            layer, use = record.layer, record.use
            if isinstance(layer, LayerOp):
                groups = np.split(use.inputs, layer.groups)
                wide = len(use.outputs) // layer.groups
                some[use.outputs] = [bit for group in groups for bit in [_any(some, group)] * wide]
                every[use.outputs] = [bit for group in groups for bit in [_all(every, group)] * wide]
            else:
                own = bits.get(layer.name, 0)
                some[use.outputs] = some[use.inputs] | own
                every[use.outputs] = every[use.inputs] | own
        elif isinstance(record, (ChannelwiseOp, SelectOp)):
            some[record.outputs], every[record.outputs] = some[record.inputs], every[record.inputs]
        elif isinstance(record, BinaryOp):
            left, right = _any(some, record.left), _any(some, record.right)
            some[record.outputs] = some[record.left] | some[record.right]
            if record.absorbs_zero:
                every[record.outputs] = every[record.left] | every[record.right]
                continue
            every[record.outputs] = every[record.left] & every[record.right]
            if left & right & _DATA:
                swap = (right & ~left).bit_count() > (left & ~right).bit_count()
                own = right & ~left if swap else left & ~right
                gating = own & _all(every, record.right if swap else record.left)
                _add(branches, [name for name in order if own & bits[name]], gating, bits)
        elif isinstance(record, ConstantOp):
            some[record.outputs] = 0
    return branches


def _executed(graph: ChannelGraph, bits: dict[str, int]) -> list[str]:
    return [norm.name for norm in graph.norms if norm.name in bits]


def _any(values: IntArray, atoms: IntArray) -> int:
    met = 0
    for value in set(values[atoms.ravel()].tolist()):
        met |= value
    return met


def _all(values: IntArray, atoms: IntArray) -> int:
    met = -1
    for value in set(values[atoms.ravel()].tolist()):
        met &= value
    return met


def _add(branches: dict[str, Branch], names: list[str], gating: int, bits: dict[str, int]) -> None:
    last = next((name for name in reversed(names) if gating & bits[name]), None)
    if last is None:
        return
    taken = {name for branch in branches.values() for name in branch.norms}
    if not taken & set(names):
        branches[last] = Branch(last, tuple(names[: names.index(last) + 1]))
