"""The channel graph: channels as atoms, and operators as relations between atoms.

Every tensor of the graph has an integer array that broadcasts to its shape and maps its entries to atoms. A feature
map (N, C, H, W) has an array of shape (1, C, 1, 1); after a flatten, (1, C*H*W) with each atom repeated. Operators
that only move data (view, permute, cat, chunk, shuffle...) are *run on these arrays*, so they need no specific rules.
Atoms of the same class are kept or cut together; a pinned class is always kept.

These relations form the `ChannelGraph`. All later analyses are walks over its operators, a `ForwardAnalysis`.
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
"""The atom of channels added by zero padding. Their value is exactly zero and their number is fixed in forward()."""


class ChannelSets:
    """Union-find over atoms. Classes may be pinned (always kept), with a reason."""

    def __init__(self) -> None:
        self._parent: IntArray = np.zeros(1024, dtype=np.int64)
        self._size = 1
        self._reasons: dict[int, str] = {PAD: "channel padding in forward() fixes their number"}

    def __len__(self) -> int:
        return self._size

    def fresh(self, count: int) -> IntArray:
        """Return `count` new atoms, each in its own class."""
        atoms = self._grow(count)
        self._parent[atoms] = atoms
        return atoms

    def follow(self, atoms: IntArray) -> IntArray:
        """Return an array of new atoms with the shape of `atoms`, each in the class of its counterpart."""
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
        """Merge the classes of `left` and `right` elementwise, with broadcasting."""
        left, right = (each.ravel() for each in np.broadcast_arrays(left, right))
        while True:
            left, right = self.find(left), self.find(right)
            apart = left != right
            if not apart.any():
                return
            left, right = left[apart], right[apart]
            low, high = np.minimum(left, right), np.maximum(left, right)
            np.minimum.at(self._parent, high, low)  # a class with several partners joins the lowest; the loop repeats
            for root in np.unique(high)[::-1].tolist():  # from high to low, so that reasons propagate to the lowest
                if root in self._reasons:
                    self._reasons.setdefault(int(self._parent[root]), self._reasons.pop(root))

    def pin(self, atoms: IntArray, reason: str) -> None:
        """Pin the classes of `atoms` for `reason`. Classes that are already pinned keep their reason."""
        for root in np.unique(self.find(atoms.ravel())).tolist():
            self._reasons.setdefault(root, reason)

    def pinned_because(self, atoms: IntArray) -> str | None:
        """Return the reason of the first of the classes of `atoms` if all of them are pinned; otherwise None."""
        roots = self.find(atoms).tolist()
        return self._reasons[roots[0]] if all(root in self._reasons for root in roots) else None

    def reasons(self, atoms: IntArray) -> set[str]:
        """Return the reasons of the pinned classes of `atoms`."""
        return {self._reasons[root] for root in np.unique(self.find(atoms)).tolist() if root in self._reasons}

    def pinned(self) -> IntArray:
        """Return the pinned classes."""
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
    """Reduce all dimensions along which `array` does not vary to size 1."""
    # Dimensions with stride 0 first, which makes expanded tensors small.
    array = array[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in array.strides)]
    for dim in range(array.ndim):
        if array.shape[dim] > 1:
            head = array.take([0], axis=dim)
            if (array.take([1], axis=dim) == head).all() and (array == head).all():
                array = head
    return np.asarray(array, order="C")  # np.ascontiguousarray would add a dimension to a scalar


# --- operators as relations between atoms -----------------------------------------------------------------------------

Evaluate = Callable[..., Tensor]
"""Applies an operator to channels that are constant over batch and space, one value per channel."""


def identity(constants: Tensor) -> Tensor:
    """Return constants unchanged, for operators that move, copy or average them over space."""
    return constants


def evaluated(evaluate: Evaluate, *columns: FloatArray, device: torch.device | str = "cpu") -> FloatArray:
    """Apply an operator to constants; complex results become NaN.

    Results depend on the device: for float64 Hardswish and Hardsigmoid, a GPU uses 1/6 rounded to float32.
    """
    found = evaluate(*(torch.from_numpy(column.copy()).to(device) for column in columns))
    return np.full(columns[0].shape, np.nan) if found.is_complex() else found.to("cpu", torch.float64).numpy()


@dataclass
class Use:
    """A call of a parametric module."""

    inputs: IntArray
    outputs: IntArray
    positions: int
    """Number of multiplications per weight and sample."""
    written: int = 0
    """Number of output positions per sample; 0 for BatchNorms."""


class _Called:
    """Base class of layers and BatchNorms, with the channels of their first call."""

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
    """A convolution or linear layer: every output channel reads all input channels of its group."""

    name: str
    kind: str
    """"conv", "conv_transpose" or "linear"."""
    groups: int
    kernel: int
    """Number of weights per pair of input and output channel."""
    padded: bool
    """Whether the input is padded with zeros, so that constants other than zero do not stay constant."""
    selectable: bool
    """Whether the operator reads the module's own input, so that a gather can be inserted before it."""
    uses: list[Use] = field(default_factory=list)
    replaceable: bool = True
    """Whether the forward() of the module is known, so that it can get a bias or be replaced by a constant."""

    @property
    def positions(self) -> int:
        return sum(use.positions for use in self.uses)

    @property
    def written(self) -> int:
        return sum(use.written for use in self.uses)


@dataclass
class NormOp(_Called):
    """A BatchNorm: each output channel reads only its own input channel."""

    name: str
    selectable: bool
    uses: list[Use] = field(default_factory=list)


@dataclass
class LayerCall:
    """A call of a layer or BatchNorm, in the order of execution."""

    layer: LayerOp | NormOp
    use: Use


@dataclass
class ChannelwiseOp:
    """An operator that processes each channel separately: activation, pooling, resampling, reduction over space."""

    inputs: IntArray
    outputs: IntArray
    evaluate: Evaluate | None
    """Applies the operator to constants; None if only its effect on zero is known."""
    keeps_zero: bool = True
    activation: str | None = None
    """Name of the activation; None for other operators."""

    _images: dict[Any, float] = field(default_factory=dict)

    @property
    def at_zero(self) -> float:
        """The value at zero; NaN if unknown."""
        return self.at_zero_on("cpu")

    def at_zero_on(self, device: torch.device | str) -> float:
        """Return the value at zero, computed on a device."""
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
    """Whether the result is zero if either operand is zero, as for a product."""
    adds: bool = False
    """Whether it is a sum or difference, whose result is zero if both operands are zero."""


@dataclass
class SelectOp:
    """A `Select` inserted by an earlier cut, whose constant index a further cut may shorten."""

    name: str
    inputs: IntArray
    """Atoms of the selected input channels, in the order of the index."""
    source: IntArray
    """Atoms of all input channels."""
    outputs: IntArray


@dataclass(frozen=True, eq=False)
class Reader:
    """A module that reads channels, with the classes of its inputs and outputs."""

    op: LayerOp | NormOp | SelectOp
    inputs: IntArray
    outputs: IntArray


@dataclass
class ConstantOp:
    """The constant output of a `ConstantOutput` module, one value per channel."""

    name: str
    outputs: IntArray
    values: Tensor


@dataclass
class OpaqueOp:
    """An operator whose outputs may all depend on all inputs. It has no rule, so these channels are pinned."""

    inputs: tuple[IntArray, ...]
    outputs: IntArray


@dataclass
class FreeParameter:
    """A parameter or buffer that is used outside a known module, with channels along one dimension."""

    name: str
    dim: int
    """Dimension of the channels; -1 if not exactly one dimension has more than one entry (its atoms are pinned)."""
    atoms: IntArray


@dataclass
class EqualWidths:
    """Pieces of a tensor (chunk, split, slices) that must all keep the same number of channels."""

    pieces: tuple[IntArray, ...]
    module: str
    """The module whose forward() takes the pieces; its attributes may hold their width."""


@dataclass(frozen=True, eq=False)
class Branch:
    """A module with layers of its own of which only the result is read. It is called once, with a tensor of the same
    batch and spatial size as the result."""

    name: str
    outputs: IntArray
    added: IntArray | None = None
    """The summand that is added to the module's input, if the result is such a sum."""
    activation: str = ""
    """The activation after this sum; empty for none."""


@dataclass(frozen=True, eq=False)
class UnprovenSize:
    """Channels whose number may be fixed by an explicit size in forward(), which a trial cut tests."""

    atoms: IntArray
    reason: str
    """Reason for freezing the channels if they cannot be cut."""
    code: str
    """The operator, and the class of the module that calls it. Sizes with the same code are tested together."""


Op = LayerCall | ChannelwiseOp | BinaryOp | SelectOp | ConstantOp | OpaqueOp


# --- sites ------------------------------------------------------------------------------------------------------------

KINDS = ("sum", "linear", "stream")
"""Kinds of sites in addition to ``"activated"``, a BatchNorm followed by an activation."""
DEFAULT_KINDS = ("sum",)
Entering = tuple[tuple[int, tuple[tuple[str, ...], ...]], ...]
"""(first channel in the wider stream, points of the narrower stream) of each stream that enters."""


@dataclass(frozen=True)
class Site:
    """One or several BatchNorms that share a mask, and the activation that follows them."""

    name: str
    """Name of the BatchNorm; the first one in order of execution if there are several."""
    width: int
    activation: str
    points: tuple[tuple[str, ...], ...] = ()
    """For each point, the BatchNorms that are added before its activation; empty for a single BatchNorm."""
    kind: str = "activated"
    entering: Entering = ()
    """Narrower streams, with masks of their own, that are zero-padded and added to this one."""

    @property
    def members(self) -> tuple[str, ...]:
        """Return the names of the BatchNorms that the mask applies to."""
        return tuple(name for point in self.points for name in point) or (self.name,)


@dataclass(frozen=True)
class Frozen:
    """A BatchNorm that is not pruned, with the reason."""

    name: str
    width: int
    reason: str
    maskable: bool = False
    """Whether the only obstacle is the operator that follows, so that methods independent of it can mask it."""


# --- the graph --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class ChannelGraph:
    """The channel graph of a model, returned by `trace` and built by `GraphBuilder`."""

    example: Example
    """The example of the user, reduced to a few samples."""
    params: dict[str, int]
    """Number of elements of each parameter."""
    sites: tuple[Site, ...] = ()
    frozen: tuple[Frozen, ...] = ()
    grouped: tuple[Site, ...] = ()
    """Possible sites of the kinds sum, linear and stream, from which :meth:`with_kinds` selects."""

    ops: list[Op] = field(default_factory=list)
    layers: list[LayerOp] = field(default_factory=list)
    """All convolutions and linear layers, without duplicates."""
    norms: list[NormOp] = field(default_factory=list)
    """All BatchNorms, without duplicates."""
    equal_widths: list[EqualWidths] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)
    """Modules that may be replaced by a constant, outer modules first."""
    free_parameters: dict[str, FreeParameter] = field(default_factory=dict)
    outputs: list[IntArray] = field(default_factory=list)
    """Atoms of the model's outputs."""
    constants: list[IntArray] = field(default_factory=list)
    """Atoms of constants in forward(), which do not depend on the input."""
    unproven_sizes: list[UnprovenSize] = field(default_factory=list)
    """Explicit sizes in forward() that may fix the number of channels, to be tested by a trial cut."""

    classes: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Maps atoms to classes; atoms of the same class are kept or cut together."""
    pinned: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Classes that are always kept."""
    unreached: tuple[str, ...] = ()
    """Parameters that no operator reads for this example, in evaluation or in training."""
    unknown: dict[str, str] = field(default_factory=dict)
    """Maps operators without a rule that freeze channels to one source location each."""
    size_dependence: str = ""
    """The first operator that depends on the input size; empty if none is known."""
    attributes_follow: bool = True
    """Whether to update integer attributes of modules that hold the width of pieces in their forward()."""
    unread_macs: int = 0
    """MACs per sample of operators without a rule, which a cut does not change."""
    unread_activations: int = 0
    """Number of activations per sample that these operators write."""

    @cached_property
    def readers(self) -> tuple[Reader, ...]:
        """The modules that read channels, in order, once per call."""
        called = [op.layer if isinstance(op, LayerCall) else op for op in self.ops]
        return tuple(
            Reader(op, self.classes[op.inputs], self.classes[op.outputs])
            for op in called
            if isinstance(op, (LayerOp, NormOp, SelectOp))
        )

    def freeze(self, atoms: IntArray, reason: str) -> ChannelGraph:
        """Return the graph with the classes of `atoms` pinned, and sites with only pinned channels frozen."""
        pinned = np.union1d(self.pinned, self.classes[atoms])
        channels = {norm.name: self.classes[norm.outputs] for norm in self.norms}
        lost = {site.name: reason for site in self.sites if np.isin(channels[site.name], pinned).all()}
        return replace(self, pinned=pinned).only(lost)

    def only(self, left_out: Mapping[str, str]) -> ChannelGraph:
        """Return the graph with the sites in `left_out` frozen, for the given reasons."""
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
        """Return the graph with additional sites of these `KINDS`.

        Streams take precedence over sums and single BatchNorms. With `every_norm`, all other maskable BatchNorms become
        sites of their own, with activation "none".
        """
        kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
        for kind in kinds:
            if kind not in KINDS:
                raise ConfigError(
                    f"kinds of sites must be among {', '.join(KINDS)}. Got {kind!r}. BatchNorms followed by an "
                    "activation are always sites."
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
        """Return the kinds of sites that would mask frozen BatchNorms, with the number of these."""
        frozen = {each.name for each in self.frozen if each.maskable}
        found: dict[str, int] = {}
        for site in self.grouped:
            count = len(frozen.intersection(site.members))
            if count:
                found[site.kind] = found.get(site.kind, 0) + count
        return found

    def member_masks(self, masks: Mapping[str, T]) -> dict[str, T]:
        """Convert masks of sites to masks of their BatchNorms."""
        sites = {site.name: site for site in self.sites}
        return {name: mask for site, mask in masks.items() for name in sites[site].members}

    @property
    def site_of(self) -> dict[str, str]:
        """Return the site of each masked BatchNorm, by name."""
        return {name: site.name for site in self.sites for name in site.members}

    def feeder(self, name: str) -> str | None:
        """Return the convolution or linear layer whose outputs are the only inputs of the BatchNorm `name`, or None."""
        norm = next(norm for norm in self.norms if norm.name == name)
        for layer in self.layers:
            fed = [np.array_equal(use.inputs, source.outputs) for use in norm.uses for source in layer.uses]
            if sum(fed) == len(norm.uses):
                return layer.name
        return None


# --- the walk ---------------------------------------------------------------------------------------------------------


class ForwardAnalysis:
    """Visits operators in order of execution, with one method per kind, and computes facts per atom.

    By default, facts are copied through channelwise operators and selections, and other operators have no effect.

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
        """Visit a call of a convolution or linear layer."""

    def norm(self, op: NormOp, use: Use) -> None:
        """Visit a call of a BatchNorm."""

    def channelwise(self, op: ChannelwiseOp) -> None:
        """Visit an operator that processes each channel separately."""
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
