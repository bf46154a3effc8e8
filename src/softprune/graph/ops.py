"""What the analysis keeps of a network: its operators as relations between atoms, in order of execution."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from softprune.graph.channels import IntArray

Evaluate = Callable[..., Tensor]
"""An operator applied to channels that are constant over batch and space, one number each."""


def identity(constants: Tensor) -> Tensor:
    """What only moves, copies or averages over space leaves constants as they are."""
    return constants


@dataclass
class Use:
    """One call of a parametric module."""

    inputs: IntArray
    outputs: IntArray
    positions: int
    """Output positions per sample: what one weight is multiplied with."""
    module: str = ""
    """The module that was called; modules with tied weights share one record."""


class _Called:
    """What layers and BatchNorms share: the channels of their first call."""

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
    """The module's name, the first of those that share its weight."""
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
    """The module itself is called and its forward is known, so that it may get a bias, or give way to a constant."""

    @property
    def aliases(self) -> tuple[str, ...]:
        """Other modules with the very same weight."""
        return tuple(dict.fromkeys(use.module for use in self.uses if use.module != self.name))

    @property
    def positions(self) -> int:
        return sum(use.positions for use in self.uses)


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
    skips_zeros: bool = False
    """Whether zeros among the inputs add nothing, so that they can be removed: a sum over channels."""


@dataclass
class FreeParameter:
    """A parameter or buffer used outside a known module, with channels along one dimension."""

    name: str
    dim: int
    """-1 where no dimension, or more than one, has channels; its atoms are pinned then."""
    atoms: IntArray


@dataclass
class ExtraMacs:
    """Multiply-accumulates outside the layers that we cut, for every channel that stays: a blur, a computed weight."""

    atoms: IntArray
    macs: int


@dataclass
class EqualWidths:
    """Pieces of a tensor that must keep equally many channels each (chunk, split, slices)."""

    pieces: tuple[IntArray, ...]


@dataclass(frozen=True, eq=False)
class UnprovenSize:
    """Channels whose number an explicit size in forward() may fix: a trial cut decides."""

    atoms: IntArray
    reason: str
    """Why they could not be cut, in words."""
    line: str
    """Where in the source: unproven_sizes of one line share a verdict."""


Op = LayerCall | ChannelwiseOp | BinaryOp | SelectOp | ConstantOp | OpaqueOp


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
    slopes: tuple[str, ...] = ()
    """Parameters that are slopes of the activation (PReLU)."""

    @property
    def members(self) -> tuple[str, ...]:
        """The BatchNorms that carry the mask."""
        return tuple(name for point in self.points for name in point) or (self.name,)


@dataclass(frozen=True)
class Frozen:
    """A BatchNorm that stays whole, and why."""

    name: str
    width: int
    reason: str
    maskable: bool = False
    """Whether only what follows it speaks against it: a method that does not ask about the activation may mask it."""
