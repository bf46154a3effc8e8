"""Sites that must not be emptied, or some output of the network would no longer depend on its inputs."""

from __future__ import annotations

from collections.abc import Set

import numpy as np
from numpy.typing import NDArray

from softprune.graph import ChannelGraph
from softprune.graph.channels import PAD, IntArray
from softprune.graph.ops import BinaryOp, ChannelwiseOp, ConstantOp, LayerCall, LayerOp, OpaqueOp, SelectOp

ObjectArray = NDArray[np.object_]

ALL = -1
"""All bits set: a constant is cut off from the input whatever lives or dies."""


def required_sites(graph: ChannelGraph) -> frozenset[str]:
    """Sites that keep a channel, so that no output of the network becomes a constant.

    Those on every path to an output; and where paths run side by side, so that none is on all of them, the sites of one
    way through.
    """
    required = _on_every_path(graph)
    wanted = _alive(graph, frozenset(site.name for site in graph.sites))
    if _alive(graph, required) == wanted:
        return required
    kept = {site.name for site in graph.sites}
    for site in graph.sites:
        if site.name not in required and _alive(graph, kept - {site.name}) == wanted:
            kept.remove(site.name)
    return frozenset(kept)


def _alive(graph: ChannelGraph, kept: Set[str]) -> list[bool]:
    """Which outputs of the network depend on its inputs if only these sites let anything through."""
    sites = {site.name for site in graph.sites}
    depends = np.ones(len(graph.classes), dtype=bool)
    # What is constant in any case takes no part in a product; what has died makes it zero.
    constant = np.zeros(len(graph.classes), dtype=bool)
    constant[PAD] = True
    for atoms in (*graph.constants, *(loose.atoms for loose in graph.free_parameters)):
        constant[atoms] = True
    depends[constant] = False
    for record in graph.ops:
        if isinstance(record, LayerCall):
            layer, use = record.layer, record.use
            if isinstance(layer, LayerOp):
                wide = len(use.outputs) // layer.groups
                groups = np.split(use.inputs, layer.groups)
                depends[use.outputs] = np.repeat([depends[group].any() for group in groups], wide)
                constant[use.outputs] = np.repeat([constant[group].all() for group in groups], wide)
            else:
                open_ = layer.name in kept or layer.name not in sites
                depends[use.outputs] = depends[use.inputs] & open_
                constant[use.outputs] = constant[use.inputs]
        elif isinstance(record, (ChannelwiseOp, SelectOp)):
            depends[record.outputs], constant[record.outputs] = (
                depends[record.inputs],
                constant[record.inputs],
            )
        elif isinstance(record, BinaryOp):
            left, right = depends[record.left], depends[record.right]
            if record.absorbs_zero:
                both = (left | constant[record.left]) & (right | constant[record.right])
                depends[record.outputs] = both & (left | right)
            else:
                depends[record.outputs] = left | right
            constant[record.outputs] = constant[record.left] & constant[record.right]
        elif isinstance(record, ConstantOp):
            depends[record.outputs], constant[record.outputs] = False, True
        elif isinstance(record, OpaqueOp):
            depends[record.outputs] = any(depends[atoms].any() for atoms in record.inputs)
            constant[record.outputs] = all(constant[atoms].all() for atoms in record.inputs)
    return [bool(depends[atoms].any()) for atoms in graph.outputs]


def _on_every_path(graph: ChannelGraph) -> frozenset[str]:
    """Sites whose death alone would make some output of the network a constant."""
    bits = {site.name: 1 << number for number, site in enumerate(graph.sites)}
    # For every atom, the sites that lie on all paths from the inputs to it. Inputs and what has no rule: none.
    through = np.zeros(len(graph.classes), dtype=object)
    through[PAD] = ALL
    for atoms in (*graph.constants, *(loose.atoms for loose in graph.free_parameters)):
        through[atoms] = ALL

    def common(atoms: IntArray) -> int:
        met = ALL
        for mask in set(through[atoms.ravel()].tolist()):
            met &= mask
        return met

    for record in graph.ops:
        if isinstance(record, LayerCall):
            layer, use = record.layer, record.use
            if isinstance(layer, LayerOp):
                groups = np.split(use.inputs, layer.groups)
                wide = len(use.outputs) // layer.groups
                through[use.outputs] = [mask for group in groups for mask in [common(group)] * wide]
            else:
                through[use.outputs] = [mask | bits.get(layer.name, 0) for mask in through[use.inputs]]
        elif isinstance(record, (ChannelwiseOp, SelectOp)):
            through[record.outputs] = through[record.inputs]
        elif isinstance(record, BinaryOp):
            left, right = through[record.left], through[record.right]
            through[record.outputs] = _either(left, right) if record.absorbs_zero else left & right
        elif isinstance(record, ConstantOp):
            through[record.outputs] = ALL
        elif isinstance(record, OpaqueOp):
            reaching = [common(atoms) for atoms in record.inputs]
            through[record.outputs] = reaching[0] if reaching else ALL
            for mask in reaching[1:]:
                through[record.outputs] &= mask
    met = 0
    for atoms in graph.outputs:
        mask = common(atoms)
        met |= 0 if mask == ALL else mask
    return frozenset(name for name, bit in bits.items() if met & bit)


def _either(left: ObjectArray, right: ObjectArray) -> ObjectArray:
    """The death of one factor is the death of the product; a constant factor has no say."""
    return np.where(left == ALL, right, np.where(right == ALL, left, left | right))
