"""Sites that must not be emptied: every path to some output of the network passes through them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from softprune.graph import ChannelGraph
from softprune.graph.atoms import PAD, IntArray
from softprune.graph.records import Call, Gather, Join, Map, Mix, Source, Wall

ObjectArray = NDArray[np.object_]

ALL = -1
"""All bits set: a constant is cut off from the input whatever lives or dies."""


def required_sites(graph: ChannelGraph) -> frozenset[str]:
    """Sites whose death would make some output of the network a constant."""
    bits = {site.name: 1 << number for number, site in enumerate(graph.sites)}
    # For every atom, the sites that lie on all paths from the inputs to it. Inputs and what has no rule: none.
    through = np.zeros(len(graph.classes), dtype=object)
    through[PAD] = ALL
    for atoms in (*graph.constants, *(loose.atoms for loose in graph.loose)):
        through[atoms] = ALL

    def common(atoms: IntArray) -> int:
        met = ALL
        for mask in set(through[atoms.ravel()].tolist()):
            met &= mask
        return met

    for record in graph.records:
        if isinstance(record, Call):
            layer, use = record.layer, record.use
            if isinstance(layer, Mix):
                groups = np.split(use.inputs, layer.groups)
                wide = len(use.outputs) // layer.groups
                through[use.outputs] = [mask for group in groups for mask in [common(group)] * wide]
            else:
                through[use.outputs] = [mask | bits.get(layer.name, 0) for mask in through[use.inputs]]
        elif isinstance(record, (Map, Gather)):
            through[record.outputs] = through[record.inputs]
        elif isinstance(record, Join):
            left, right = through[record.left], through[record.right]
            through[record.outputs] = _either(left, right) if record.absorbs_zero else left & right
        elif isinstance(record, Source):
            through[record.outputs] = ALL
        elif isinstance(record, Wall):
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
