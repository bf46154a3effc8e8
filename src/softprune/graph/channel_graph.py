"""The channel graph of a network: what `trace` returns and every later step reads."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

import numpy as np

from softprune.graph.channels import (
    Branch,
    EqualWidths,
    FreeParameter,
    Frozen,
    IntArray,
    LayerCall,
    LayerOp,
    NormOp,
    Op,
    Reader,
    SelectOp,
    Site,
    UnprovenSize,
)
from softprune.graph.reader import Example

T = TypeVar("T")


@dataclass(eq=False)
class ChannelGraph:
    """Which channels of which modules are one, in the order of execution. A `GraphBuilder` fills it."""

    example: Example
    """The call that was given, on a few of its samples."""
    params: dict[str, int]
    """How many numbers each parameter has."""
    sites: tuple[Site, ...] = ()
    frozen: tuple[Frozen, ...] = ()
    grouped: tuple[Site, ...] = ()
    """Sites of other kinds that BatchNorms could form; :meth:`with_kinds` chooses among them."""

    ops: list[Op] = field(default_factory=list)
    layers: list[LayerOp] = field(default_factory=list)
    """The convolutions and linear layers, each once."""
    norms: list[NormOp] = field(default_factory=list)
    """The BatchNorms, each once."""
    equal_widths: list[EqualWidths] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)
    """Modules that a constant may replace, the outer ones first."""
    free_parameters: dict[str, FreeParameter] = field(default_factory=dict)
    outputs: list[IntArray] = field(default_factory=list)
    """Atoms of the model's outputs."""
    constants: list[IntArray] = field(default_factory=list)
    """Atoms of constants in forward(): no input reaches an output through them."""
    unproven_sizes: list[UnprovenSize] = field(default_factory=list)
    """What explicit sizes in forward() may fix: a trial cut decides."""

    classes: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Atom -> its class; atoms of one class are kept or cut together."""
    pinned: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Classes that are always kept."""
    unreached: tuple[str, ...] = ()
    """Parameters that no operator reads, in evaluation or in training: the example does not lead there."""
    unknown: dict[str, str] = field(default_factory=dict)
    """Operators without a rule that freeze channels -> one place where they stand."""
    size_dependence: str = ""
    """The first operator that another input size changes; empty where none is known."""
    attributes_follow: bool = True
    """Whether integers on a module that repeat the width of pieces in its forward() are cut, too."""
    unread_macs: int = 0
    """MACs per sample of operators without a rule, which no cut changes."""
    unread_activations: int = 0
    """What they write per sample."""

    @cached_property
    def readers(self) -> tuple[Reader, ...]:
        """The modules that read channels, in order, once for every call."""
        called = [op.layer if isinstance(op, LayerCall) else op for op in self.ops]
        return tuple(
            Reader(op, self.classes[op.inputs], self.classes[op.outputs])
            for op in called
            if isinstance(op, (LayerOp, NormOp, SelectOp))
        )

    def freeze(self, atoms: IntArray, reason: str) -> ChannelGraph:
        """Return the graph with the classes of `atoms` pinned, and the sites that lose every channel by it frozen."""
        pinned = np.union1d(self.pinned, self.classes[atoms])
        channels = {norm.name: self.classes[norm.outputs] for norm in self.norms}
        lost = {site.name: reason for site in self.sites if np.isin(channels[site.name], pinned).all()}
        return replace(self, pinned=pinned).only(lost)

    def only(self, left_out: Mapping[str, str]) -> ChannelGraph:
        """Return the graph with the sites in `left_out` frozen, each for the reason given there."""
        if not left_out:
            return self
        frozen = [
            Frozen(name, site.width, left_out[site.name])
            for site in self.sites
            if site.name in left_out
            for name in site.members
        ]
        return replace(
            self, sites=tuple(site for site in self.sites if site.name not in left_out), frozen=(*self.frozen, *frozen)
        )

    def with_kinds(self, kinds: Collection[str], *, every_norm: bool = False) -> ChannelGraph:
        """Return the graph with sites of these kinds, too: "sum", "linear", "stream".

        A stream takes its BatchNorms from sums and from sites of one BatchNorm. With `every_norm`, each BatchNorm that
        only what follows it speaks against is a site of its own (activation "none").
        """
        free = {frozen.name for frozen in self.frozen} | {site.name for site in self.sites}
        more: list[Site] = []
        for site in sorted(self.grouped, key=lambda site: site.kind != "stream"):
            if site.kind in kinds and free.issuperset(site.members):
                more.append(site)
                free -= set(site.members)
        if every_norm:
            more += [Site(each.name, each.width, "none") for each in self.frozen if each.maskable and each.name in free]
        taken = {name for site in more for name in site.members}
        order = {norm.name: number for number, norm in enumerate(self.norms)}
        sites = [*(site for site in self.sites if site.name not in taken), *more]
        return replace(
            self,
            sites=tuple(sorted(sites, key=lambda site: order[site.name])) if more else self.sites,
            frozen=tuple(frozen for frozen in self.frozen if frozen.name not in taken),
        )

    def further_kinds(self) -> dict[str, int]:
        """Return the kinds of sites that would mask frozen BatchNorms, and how many of them."""
        frozen = {each.name for each in self.frozen if each.maskable}
        found: dict[str, int] = {}
        for site in self.grouped:
            count = len(frozen.intersection(site.members))
            if count:
                found[site.kind] = found.get(site.kind, 0) + count
        return found

    def member_masks(self, masks: Mapping[str, T]) -> dict[str, T]:
        """Return the masks of sites as masks of their BatchNorms."""
        sites = {site.name: site for site in self.sites}
        return {name: mask for site, mask in masks.items() for name in sites[site].members}

    @property
    def site_of(self) -> dict[str, str]:
        """Return BatchNorm that carries a mask -> its site."""
        return {name: site.name for site in self.sites for name in site.members}

    def feeder(self, name: str) -> str | None:
        """Return the convolution or linear layer whose outputs, and nothing else, the BatchNorm `name` reads."""
        norm = next(norm for norm in self.norms if norm.name == name)
        for layer in self.layers:
            fed = [np.array_equal(use.inputs, source.outputs) for use in norm.uses for source in layer.uses]
            if sum(fed) == len(norm.uses):
                return layer.name
        return None
