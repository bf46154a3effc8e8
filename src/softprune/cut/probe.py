"""Cut a copy of the network with random masks before training, and freeze what does not come out equal.

``x.view(b, 2, c // 2, h, w)`` and ``x.view(b, 2, 58, h, w)`` look the same to torch.export, and no rule knows every way
to write a forward(). The probe therefore cuts every network in several ways and compares the cut network with the
masked one on a small random input: before a GPU-hour is spent, not after.
"""

from collections.abc import Sequence

import numpy as np
from torch import nn

from softprune.cut.comparison import one_thread, without_onednn
from softprune.cut.trials import Probe, site_names
from softprune.graph import ChannelGraph
from softprune.graph.ops import UnprovenSize
from softprune.log import get_logger

logger = get_logger(__name__)


def probe_cuts(graph: ChannelGraph, model: nn.Module) -> ChannelGraph:
    """Return `graph` with everything frozen that a probe shows to be impossible to cut."""
    if not graph.sites or any(parameter.is_meta for parameter in model.parameters()):
        return graph
    with one_thread(), without_onednn():
        probe = Probe(graph, model)
        graph = graph.only(probe.call_copy(graph))
        while graph.sites and probe.finds_failure(graph):
            graph = _without_causes(probe, graph)
    return graph


def _without_causes(probe: Probe, graph: ChannelGraph) -> ChannelGraph:
    """Freeze what cannot be cut with the masks that have failed."""
    whole = _frozen_at(graph, graph.unproven_sizes)
    misread = probe.failure(graph, []) if probe.failure(whole) is not None else None
    if misread is not None:
        reason = f"softprune misreads this network: with nothing masked its cut failed ({misread}); please report it"
        logger.warning("softprune: %s: %s", probe.network, reason)
        return graph.freeze(np.arange(len(graph.classes)), reason)
    # Sites that fail with all unproven sizes frozen are no fault of a size.
    failing = list(_causes(probe, whole, site_names(whole))) if graph.unproven_sizes else []
    graph = _without_literals(probe, graph, failing)
    others = site_names(graph, failing)
    causes = _causes(probe, graph, others)
    causes |= _causes(probe, graph, failing, [name for name in others if name not in causes])
    found = [graph.only({name: f"a trial cut of it failed ({reason})" for name, reason in causes.items()})]
    if causes:
        # A literal size may matter only where sites die together that freezing another size had frozen.
        fewer = [_frozen_at(graph, group) for group in _connected(graph)]
        found += [each for each in fewer if probe.failure(each) is None]
    return max(found, key=lambda each: len(each.sites))


def _without_literals(probe: Probe, graph: ChannelGraph, failing: Sequence[str]) -> ChannelGraph:
    """Freeze unproven sizes that are literals until only `failing` sites fail; each is tried with all others frozen."""
    for group in _connected(graph):
        if probe.failure(graph, site_names(graph, failing)) is None:
            break
        others = _frozen_at(graph, [size for size in graph.unproven_sizes if size not in group])
        if probe.failure(others, site_names(others, failing)) is not None:
            graph = _frozen_at(graph, group)
    return graph


def _frozen_at(graph: ChannelGraph, sizes: Sequence[UnprovenSize]) -> ChannelGraph:
    """Return `graph` without the sites whose number of channels these literal `sizes` fix."""
    for size in sizes:
        graph = graph.freeze(size.atoms, f"its channels cannot be cut: {size.reason}")
    return graph


def _connected(graph: ChannelGraph) -> list[list[UnprovenSize]]:
    """Group the sizes that can only be tried together: of one line of the source, or with channels in common."""
    groups: list[tuple[set[object], list[UnprovenSize]]] = []
    for size in graph.unproven_sizes:
        marks: set[object] = {size.line, *graph.classes[size.atoms].tolist()}
        members = [size]
        for group in [group for group in groups if not group[0].isdisjoint(marks)]:
            groups.remove(group)
            marks, members = marks | group[0], group[1] + members
        groups.append((marks, members))
    return [members for _, members in groups]


def _causes(probe: Probe, graph: ChannelGraph, names: Sequence[str], kept: Sequence[str] = ()) -> dict[str, str]:
    """Return the sites among `names` that cannot be cut together with `kept`, with the reason, by bisection."""
    failure = probe.failure(graph, [*kept, *names]) if names else None
    if failure is None:
        return {}
    if len(names) == 1:
        return {names[0]: failure}
    first, second = names[: len(names) // 2], names[len(names) // 2 :]
    causes = _causes(probe, graph, first, kept)
    kept = [*kept, *(name for name in first if name not in causes)]
    return {**causes, **_causes(probe, graph, second, kept)}
