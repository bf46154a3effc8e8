"""Channels as atoms, and operators as relations between atoms.

Every tensor of the graph carries an integer array that broadcasts to its shape: entry -> atom. A (N, C, H, W)
feature map has an array of shape (1, C, 1, 1); after a flatten, (1, C*H*W) with each atom repeated. Operators that
only move data (view, permute, cat, chunk, shuffle...) are *run on these arrays*, so no rule has to guess what they
do. Two atoms in one class are kept or cut together; a pinned class is always kept.

All of it together is the `ChannelGraph`, and every later step is a walk over its operators, a `ForwardAnalysis`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softprune.errors import ConfigError
from softprune.graph.reader import Example

T = TypeVar("T")
IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

PAD = 0
"""The atom of channels that constant padding adds: exactly zero, and bound to the forward's Python constant."""


class ChannelSets:
    """A growing union-find over atoms; a class may be pinned (always kept), with the reason in words."""

    def __init__(self) -> None:
        self._parent: IntArray = np.zeros(1024, dtype=np.int64)
        self._size = 1
        self._reasons: dict[int, str] = {PAD: "channel padding in forward() fixes their number"}

    def __len__(self) -> int:
        return self._size

    def fresh(self, count: int) -> IntArray:
        """Return `count` new atoms, each a class of its own."""
        atoms = self._grow(count)
        self._parent[atoms] = atoms
        return atoms

    def follow(self, atoms: IntArray) -> IntArray:
        """Return new atoms in an array of the same shape, each in the class of its counterpart in `atoms`."""
        new = self._grow(atoms.size)
        self._parent[new] = self.find(atoms.ravel())
        return new.reshape(atoms.shape)

    def find(self, atoms: IntArray) -> IntArray:
        """Return the classes of `atoms`."""
        roots = self._parent[atoms]
        while not np.array_equal(above := self._parent[roots], roots):
            self._parent[atoms] = roots = above
        return roots

    def union(self, left: IntArray, right: IntArray) -> None:
        """Join the classes of `left` and `right`, entry by entry (the arrays broadcast)."""
        left, right = (each.ravel() for each in np.broadcast_arrays(left, right))
        while True:
            left, right = self.find(left), self.find(right)
            apart = left != right
            if not apart.any():
                return
            left, right = left[apart], right[apart]
            low, high = np.minimum(left, right), np.maximum(left, right)
            np.minimum.at(self._parent, high, low)  # a class that meets several joins the lowest; the rest follow
            for root in np.unique(high)[::-1].tolist():  # a lower one passes on what it has got from a higher one
                if root in self._reasons:
                    self._reasons.setdefault(int(self._parent[root]), self._reasons.pop(root))

    def pin(self, atoms: IntArray, reason: str) -> None:
        """Keep the classes of `atoms` for ever, because of `reason` (the first one given stays)."""
        for root in np.unique(self.find(atoms.ravel())).tolist():
            self._reasons.setdefault(root, reason)

    def pinned_because(self, atoms: IntArray) -> str | None:
        """Return why all classes of `atoms` are pinned, by the first of them; None where one is not."""
        roots = self.find(atoms).tolist()
        return self._reasons[roots[0]] if all(root in self._reasons for root in roots) else None

    def reasons(self, atoms: IntArray) -> set[str]:
        """Return why classes of `atoms` are pinned, of those that are."""
        return {self._reasons[root] for root in np.unique(self.find(atoms)).tolist() if root in self._reasons}

    def pinned(self) -> IntArray:
        """Return the classes that are always kept."""
        return np.array(sorted(self._reasons), dtype=np.int64)

    def classes(self) -> IntArray:
        """Return the class of every atom."""
        return self.find(np.arange(self._size, dtype=np.int64))

    def _grow(self, count: int) -> IntArray:
        start, self._size = self._size, self._size + count
        if self._size > len(self._parent):
            grown = np.zeros(2 * self._size, dtype=np.int64)
            grown[:start] = self._parent[:start]
            self._parent = grown
        return np.arange(start, self._size, dtype=np.int64)


def collapse(array: NDArray[Any]) -> NDArray[Any]:
    """Return `array` with every dimension along which it does not vary reduced to size 1."""
    # Repeated memory first: a tensor that was expanded is small.
    array = array[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in array.strides)]
    for dim in range(array.ndim):
        if array.shape[dim] > 1:
            head = array.take([0], axis=dim)
            if (array.take([1], axis=dim) == head).all() and (array == head).all():
                array = head
    return np.asarray(array, order="C")  # np.ascontiguousarray would give a single number a dimension


# --- operators as relations between atoms -----------------------------------------------------------------------------

Evaluate = Callable[..., Tensor]
"""An operator applied to channels that are constant over batch and space, one number each."""


def identity(constants: Tensor) -> Tensor:
    """Return constants unchanged, as what only moves, copies or averages them over space does."""
    return constants


def evaluated(evaluate: Evaluate, *columns: FloatArray, device: torch.device | str = "cpu") -> FloatArray:
    """Return what an operator gives for constants; NaN where it gives complex numbers.

    Devices differ: in float64 Hardswish and Hardsigmoid multiply by a sixth that a GPU has rounded to float32.
    """
    found = evaluate(*(torch.from_numpy(column.copy()).to(device) for column in columns))
    return np.full(columns[0].shape, np.nan) if found.is_complex() else found.to("cpu", torch.float64).numpy()


@dataclass
class Use:
    """One call of a parametric module."""

    inputs: IntArray
    outputs: IntArray
    positions: int
    """Positions per sample that one weight is multiplied with."""
    written: int = 0
    """Output positions per sample; those of a layer alone are counted."""


class _Called:
    """What layers and BatchNorms share: the channels of their first call."""

    name: str
    uses: list[Use]

    @property
    def inputs(self) -> IntArray:
        return self.uses[0].inputs

    @property
    def outputs(self) -> IntArray:
        return self.uses[0].outputs


@dataclass
class LayerOp(_Called):
    """A convolution or linear layer: every output channel reads every input channel of its group."""

    name: str
    kind: str
    """"conv", "conv_transpose" or "linear"."""
    groups: int
    kernel: int
    """Weights between one input and one output channel."""
    padded: bool
    """Zeros are padded in: a constant other than zero does not stay constant."""
    selectable: bool
    """The module's own input is what the operator reads, so an index can be put before it."""
    uses: list[Use] = field(default_factory=list)
    replaceable: bool = True
    """The module's forward is known, so that it may get a bias, or give way to a constant."""

    @property
    def positions(self) -> int:
        return sum(use.positions for use in self.uses)

    @property
    def written(self) -> int:
        return sum(use.written for use in self.uses)


@dataclass
class NormOp(_Called):
    """A BatchNorm: each output channel reads its own input channel."""

    name: str
    selectable: bool
    uses: list[Use] = field(default_factory=list)


@dataclass
class LayerCall:
    """One use of a layer or BatchNorm, at its place in the order of execution."""

    layer: LayerOp | NormOp
    use: Use


@dataclass
class ChannelwiseOp:
    """An operator that treats each channel by itself: activation, pooling, resampling, reduction over space."""

    inputs: IntArray
    outputs: IntArray
    evaluate: Evaluate | None
    """On constants; None where only zero is known to stay what it is."""
    keeps_zero: bool = True
    activation: str | None = None
    """The activation that it is, by name."""

    _images: dict[Any, float] = field(default_factory=dict)

    @property
    def at_zero(self) -> float:
        """The image of zero; NaN where it is unknown."""
        return self.at_zero_on("cpu")

    def at_zero_on(self, device: torch.device | str) -> float:
        """Return the image of zero on a device."""
        if self.evaluate is None:
            return 0.0 if self.keeps_zero else math.nan
        if device not in self._images:
            self._images[device] = float(evaluated(self.evaluate, np.zeros(1), device=device)[0])
        return self._images[device]


@dataclass
class BinaryOp:
    """An element-wise operator on two tensors."""

    left: IntArray
    right: IntArray
    outputs: IntArray
    evaluate: Evaluate
    absorbs_zero: bool
    """Zero times anything is zero."""
    adds: bool = False
    """Whether it is a sum or a difference: zero where both tensors are zero."""


@dataclass
class SelectOp:
    """A `Select` that an earlier cut put in: a constant index that a further cut may shorten."""

    name: str
    inputs: IntArray
    """Atoms of the selected input channels, in the order of the index."""
    source: IntArray
    """Atoms of all input channels."""
    outputs: IntArray


@dataclass(frozen=True, eq=False)
class Reader:
    """A module that reads channels, with their classes."""

    op: LayerOp | NormOp | SelectOp
    inputs: IntArray
    outputs: IntArray


@dataclass
class ConstantOp:
    """Channels that come from no operator we cut: constants of `ConstantOutput` modules (value per channel)."""

    name: str
    outputs: IntArray
    values: Tensor


@dataclass
class OpaqueOp:
    """An operator each of whose outputs may depend on every input. Without a rule, everything around it stays."""

    inputs: tuple[IntArray, ...]
    outputs: IntArray


@dataclass
class FreeParameter:
    """A parameter or buffer used outside a known module, with channels along one dimension."""

    name: str
    dim: int
    """-1 where no dimension, or more than one, has channels; its atoms are pinned then."""
    atoms: IntArray


@dataclass
class EqualWidths:
    """Pieces of a tensor that must keep equally many channels each (chunk, split, slices)."""

    pieces: tuple[IntArray, ...]
    module: str
    """The module whose forward takes them; its attributes may repeat their width."""


@dataclass(frozen=True, eq=False)
class Branch:
    """A module with layers of its own that is called once, for one tensor of the same batch and space, and of which
    nothing but the result is read."""

    name: str
    outputs: IntArray
    added: IntArray | None = None
    """Where the result is a sum with the module's input: the other summand."""
    activation: str = ""
    """The activation after that sum, if there is one."""


@dataclass(frozen=True, eq=False)
class UnprovenSize:
    """Channels whose number an explicit size in forward() may fix: a trial cut decides."""

    atoms: IntArray
    reason: str
    """Why they could not be cut, in words."""
    code: str
    """The operator, and the class of module in whose forward() it stands: sizes of one code share a verdict."""


Op = LayerCall | ChannelwiseOp | BinaryOp | SelectOp | ConstantOp | OpaqueOp


# --- sites ------------------------------------------------------------------------------------------------------------

KINDS = ("sum", "linear", "stream")
"""Kinds of sites beside ``"activated"``, a BatchNorm that an activation reads."""
DEFAULT_KINDS = ("sum",)
Entering = tuple[tuple[int, tuple[tuple[str, ...], ...]], ...]
"""Points of narrower streams, with the channel of the wider stream at which their first channel enters."""


@dataclass(frozen=True)
class Site:
    """One or several BatchNorms that share one mask, and the activation that reads them."""

    name: str
    """The BatchNorm, the first in order of execution where there are several."""
    width: int
    activation: str
    points: tuple[tuple[str, ...], ...] = ()
    """BatchNorms that are added up before one activation each; empty where the site is one BatchNorm."""
    kind: str = "activated"
    entering: Entering = ()
    """BatchNorms of narrower streams that are added to this one between zero channels. They have masks of their own."""

    @property
    def members(self) -> tuple[str, ...]:
        """Return the BatchNorms that carry the mask."""
        return tuple(name for point in self.points for name in point) or (self.name,)


@dataclass(frozen=True)
class Frozen:
    """A BatchNorm that stays whole, and why."""

    name: str
    width: int
    reason: str
    maskable: bool = False
    """Whether only what follows it speaks against it: a method that does not ask about the activation may mask it."""


# --- the graph --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class ChannelGraph:
    """What `trace` returns: which channels of which modules are one, in order. A `GraphBuilder` fills it."""

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

    def with_kinds(self, kinds: Iterable[str], *, every_norm: bool = False) -> ChannelGraph:
        """Return the graph with sites of these `KINDS`, too.

        A stream takes its BatchNorms from sums and from sites of one BatchNorm. With `every_norm`, each BatchNorm that
        only what follows it speaks against is a site of its own (activation "none").
        """
        kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
        for kind in kinds:
            if kind not in KINDS:
                raise ConfigError(
                    f"kinds of sites must be among {', '.join(KINDS)}. Got {kind!r}. A BatchNorm that an activation "
                    "reads is a site in any case."
                )
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


# --- the walk ---------------------------------------------------------------------------------------------------------


class ForwardAnalysis:
    """Visits operators in order of execution, with one method per kind, and keeps facts per atom.

    By default facts move unchanged through channelwise operators and selections, and the other operators do nothing.

    Args:
        facts: Arrays with one entry per atom of the graph.
    """

    def __init__(self, *facts: NDArray[Any]) -> None:
        self.facts = facts

    def copy(self, inputs: IntArray, outputs: IntArray) -> None:
        """Give each of `outputs` the facts of its counterpart in `inputs`."""
        for fact in self.facts:
            fact[outputs] = fact[inputs]

    def layer(self, op: LayerOp, use: Use) -> None:
        """Visit one call of a convolution or linear layer."""

    def norm(self, op: NormOp, use: Use) -> None:
        """Visit one call of a BatchNorm."""

    def channelwise(self, op: ChannelwiseOp) -> None:
        """Visit an operator that treats each channel by itself."""
        self.copy(op.inputs, op.outputs)

    def binary(self, op: BinaryOp) -> None:
        """Visit an element-wise operator on two tensors."""

    def select(self, op: SelectOp) -> None:
        """Visit a `Select` that an earlier cut inserted."""
        self.copy(op.inputs, op.outputs)

    def constant(self, op: ConstantOp) -> None:
        """Visit the output of a `ConstantOutput`."""

    def opaque(self, op: OpaqueOp) -> None:
        """Visit an operator without a rule."""

    def forward(self, ops: Iterable[Op]) -> Self:
        """Call the method for the kind of each of `ops`, and return the analysis."""
        visit: dict[type[Any], Callable[[Any], None]] = {
            ChannelwiseOp: self.channelwise,
            BinaryOp: self.binary,
            SelectOp: self.select,
            ConstantOp: self.constant,
            OpaqueOp: self.opaque,
            LayerCall: lambda op: (self.layer if isinstance(op.layer, LayerOp) else self.norm)(op.layer, op.use),
        }
        for op in ops:
            visit[type(op)](op)
        return self
