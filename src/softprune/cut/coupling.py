"""How the masks of several sites act together: coupled sites, and sites that must keep a channel."""

from collections.abc import Set
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from softprune.graph import ChannelGraph
from softprune.graph.channels import PAD
from softprune.graph.ops import (
    BinaryOp,
    ConstantOp,
    ForwardAnalysis,
    LayerOp,
    NormOp,
    OpaqueOp,
    Use,
    all_in_group,
    any_in_group,
)

NONE = -1


def coupled_sites(graph: ChannelGraph) -> tuple[tuple[str, ...], ...]:
    """Return the groups of sites that only channelwise operators connect, such as a depthwise convolution.

    A channel remains only if all sites of its group keep it. Each group is in order of execution, and its sites have
    their channels in the same order.
    """
    found = _Couplings(graph)
    found.forward(graph.ops)
    return tuple(tuple(group) for group in found.groups.values())


class _Couplings(ForwardAnalysis):
    """For every atom, the first and the last site of the group it comes from, and its channel there."""

    def __init__(self, graph: ChannelGraph) -> None:
        self.widths = {site.name: site.width for site in graph.sites}
        self.names = list(self.widths)
        self.site_of = graph.site_of
        self.first = np.full(len(graph.classes), NONE)
        self.last = np.full(len(graph.classes), NONE)
        self.channel = np.full(len(graph.classes), NONE)
        self.groups: dict[int, list[str]] = {}
        super().__init__(self.first, self.last, self.channel)

    def layer(self, op: LayerOp, use: Use) -> None:
        if op.groups == len(use.inputs) == len(use.outputs):
            self.copy(use.inputs, use.outputs)

    def binary(self, op: BinaryOp) -> None:
        # BatchNorms of one site die together. Of two sites of a group, either keeps the sum alive.
        if op.adds and all(bool((fact[op.left] == fact[op.right]).all()) for fact in self.facts):
            self.copy(op.left, op.outputs)

    def norm(self, op: NormOp, use: Use) -> None:
        site = self.site_of.get(op.name)
        if site is None:
            self.copy(use.inputs, use.outputs)
            return
        channels = np.arange(len(use.outputs))
        first = int(self.first[use.inputs[0]]) if len(use.inputs) else NONE
        coupled = (
            first != NONE
            and self.widths[self.names[first]] == len(channels)
            and bool((self.first[use.inputs] == first).all())
            and bool((self.channel[use.inputs] == channels).all())
        )
        # The BatchNorms of one site have the same mask in any case.
        coupled = coupled and self.names[first] != site
        if coupled and not any(site in group for group in self.groups.values()):
            self.groups.setdefault(first, [self.names[first]]).append(site)
        self.last[use.outputs] = self.names.index(site)
        self.first[use.outputs] = first if coupled else self.last[use.outputs]
        self.channel[use.outputs] = channels


_required: WeakKeyDictionary[ChannelGraph, frozenset[str]] = WeakKeyDictionary()
"""What :func:`required_sites` has found, as long as the graph lives."""


def floor_masks(graph: ChannelGraph) -> dict[str, Tensor]:
    """Masks that drop all there is to drop."""
    required = required_sites(graph)
    return {site.name: torch.arange(site.width) < int(site.name in required) for site in graph.sites}


def required_sites(graph: ChannelGraph) -> frozenset[str]:
    """Return the sites that must keep a channel, so that no output of the network becomes a constant.

    These are the sites on every path to an output. Where paths run in parallel, so that no site is on all of them, the
    sites of one path are added. Trial cuts, `inspect` and a pruner ask for the same graph.
    """
    if graph not in _required:
        names = [site.name for site in graph.sites]
        every = frozenset(names)
        _required[graph] = _without_spare(graph, every, names, _live_outputs(graph, every))
    return _required[graph]


def _without_spare(graph: ChannelGraph, kept: frozenset[str], names: list[str], wanted: list[bool]) -> frozenset[str]:
    """Return `kept` without those of `names` that no output needs, taken in order.

    Where all of them may die, so may any part, so that one pass decides a whole run of sites.
    """
    fewer = kept - set(names)
    if _live_outputs(graph, fewer) == wanted:
        return fewer
    if len(names) == 1:
        return kept
    half = len(names) // 2
    return _without_spare(graph, _without_spare(graph, kept, names[:half], wanted), names[half:], wanted)


def _live_outputs(graph: ChannelGraph, kept: Set[str]) -> list[bool]:
    """Return for each output of the network whether it depends on the inputs if only the sites `kept` are alive."""
    found = _Dependence(graph, {norm for norm, site in graph.site_of.items() if site not in kept})
    found.forward(graph.ops)
    return [bool(found.depends[atoms].any()) for atoms in graph.outputs]


class _Dependence(ForwardAnalysis):
    """Which atoms depend on the inputs, and which are constant whichever sites are dead."""

    def __init__(self, graph: ChannelGraph, dead: Set[str]) -> None:
        self.dead = dead
        self.is_constant = np.zeros(len(graph.classes), dtype=bool)
        self.is_constant[PAD] = True
        for atoms in (*graph.constants, *(parameter.atoms for parameter in graph.free_parameters)):
            self.is_constant[atoms] = True  # no input reaches them
        self.depends = ~self.is_constant
        super().__init__(self.depends, self.is_constant)

    def layer(self, op: LayerOp, use: Use) -> None:
        self.depends[use.outputs] = any_in_group(op, use, self.depends)
        self.is_constant[use.outputs] = all_in_group(op, use, self.is_constant)

    def norm(self, op: NormOp, use: Use) -> None:
        self.copy(use.inputs, use.outputs)
        if op.name in self.dead:
            self.depends[use.outputs] = False

    def binary(self, op: BinaryOp) -> None:
        left, right = self.depends[op.left], self.depends[op.right]
        depends = left | right
        if op.absorbs_zero:  # a constant factor changes nothing; a dead one makes the product zero
            depends &= (left | self.is_constant[op.left]) & (right | self.is_constant[op.right])
        self.depends[op.outputs] = depends
        self.is_constant[op.outputs] = self.is_constant[op.left] & self.is_constant[op.right]

    def constant(self, op: ConstantOp) -> None:
        self.depends[op.outputs], self.is_constant[op.outputs] = False, True

    def opaque(self, op: OpaqueOp) -> None:
        self.depends[op.outputs] = any(self.depends[atoms].any() for atoms in op.inputs)
        self.is_constant[op.outputs] = all(self.is_constant[atoms].all() for atoms in op.inputs)
