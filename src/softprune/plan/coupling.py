"""Sites in a line, with nothing but channelwise operators between them: a depthwise convolution, say.

Of such sites only the channels that all of them keep are left.
"""

from __future__ import annotations

import numpy as np

from softprune.graph import ChannelGraph
from softprune.graph.ops import ChannelwiseOp, LayerCall, LayerOp, SelectOp

NOBODY = -1


def coupled_sites(graph: ChannelGraph) -> tuple[tuple[str, ...], ...]:
    """The lines of two or more sites, each in order of execution; channels have the same order in all of a line."""
    widths = {site.name: site.width for site in graph.sites}
    numbers = {name: number for number, name in enumerate(widths)}
    names = list(widths)
    lines: dict[int, list[str]] = {}
    # For every atom, the first site of the line that it comes from, and its channel there.
    leader = np.full(len(graph.classes), NOBODY)
    channel = np.full(len(graph.classes), NOBODY)
    for record in graph.ops:
        if (
            isinstance(record, LayerCall)
            and not isinstance(record.layer, LayerOp)
            and record.layer.name in numbers
        ):
            name, use = record.layer.name, record.use
            own = np.arange(len(use.outputs))
            first = int(leader[use.inputs[0]]) if len(use.inputs) else NOBODY
            is_next = (
                first != NOBODY
                and widths[names[first]] == len(own)
                and bool((leader[use.inputs] == first).all())
                and bool((channel[use.inputs] == own).all())
            )
            if is_next and not any(name in line for line in lines.values()):
                lines.setdefault(first, [names[first]]).append(name)
            leader[use.outputs] = first if is_next else numbers[name]
            channel[use.outputs] = own
        elif isinstance(record, (ChannelwiseOp, SelectOp)) or (
            isinstance(record, LayerCall) and _is_channelwise(record)
        ):
            inputs, outputs = (
                (record.use.inputs, record.use.outputs)
                if isinstance(record, LayerCall)
                else (
                    record.inputs,
                    record.outputs,
                )
            )
            leader[outputs], channel[outputs] = leader[inputs], channel[inputs]
    return tuple(tuple(line) for line in lines.values())


def _is_channelwise(call: LayerCall) -> bool:
    """One input, one output for each group; or a BatchNorm that is no site."""
    layer, use = call.layer, call.use
    return not isinstance(layer, LayerOp) or layer.groups == len(use.inputs) == len(use.outputs)
