"""Sparse Structure Selection: a factor on every structure, pushed to exactly zero by a proximal step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Unpack, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from softprune.errors import ConfigError
from softprune.graph import ChannelGraph, ExampleLike, Site
from softprune.graph.channels import IntArray
from softprune.graph.ops import BinaryOp, ChannelwiseOp, ConstantOp, LayerCall, LayerOp, SelectOp
from softprune.masks import AffineGate, FixedGate, Gate
from softprune.methods.affine import AffinePruner, LearnedVector
from softprune.methods.options import PrunerOptions
from softprune.methods.ranking import fill_up
from softprune.selection import Globs, read_graph

Structure = Literal["auto", "block", "channel"]
_DATA = 1
"""The bit of values that depend on the network's input, unlike constants and parameters."""


@dataclass(frozen=True)
class Branch:
    """A residual branch: what one addition adds to the stream."""

    last: str
    """The last BatchNorm that every path of the branch passes: dead, it makes the branch zero."""
    norms: tuple[str, ...]
    """All masked BatchNorms that stand in the branch alone, in the order of execution, up to `last`."""


def residual_branches(graph: ChannelGraph) -> dict[str, Branch]:
    """Return the branches that an addition joins to a shortcut, by their last BatchNorm, among the sites of `graph`.

    Of the two sides of an addition, the branch is the one with more BatchNorms that the other lacks. A branch with
    no BatchNorm on all of its paths is left out, and so is one that shares a BatchNorm with another.
    """
    bits = {site.name: 2 << number for number, site in enumerate(graph.sites)}
    order = {name: number for number, name in enumerate(_executed(graph, bits))}
    # Per atom: sites on some path from the input, and sites on every path.
    some = np.full(len(graph.classes), _DATA, dtype=object)
    every = np.zeros(len(graph.classes), dtype=object)
    for parameter in graph.free_parameters:
        some[parameter.atoms] = 0
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


@torch.no_grad()
def proximal_step_(
    factor: Tensor,
    velocity: Tensor,
    gradient: Tensor,
    rate: float | Tensor,
    momentum: float,
    strength: float | Tensor,
) -> None:
    """One accelerated proximal step with non-negative factors, in place.

    z = soft(f - rate * gradient, rate * strength); v = z - f + momentum * v; f = max(0, z + momentum * v)
    """
    moved = factor - rate * gradient
    shrunk = torch.sign(moved) * torch.clamp(moved.abs() - rate * strength, min=0.0)
    velocity.mul_(momentum).add_(shrunk - factor)
    factor.copy_(torch.clamp(shrunk + momentum * velocity, min=0.0))


class _FactorGate(AffineGate):
    """Multiplies a BatchNorm's output by factors: one per channel, or one for all of them."""

    def __init__(self, extra: LearnedVector, width: int, round_to: int, floor: int) -> None:
        super().__init__(torch.ones(width, dtype=torch.bool))
        self.extra, self.round_to, self.floor = extra, round_to, floor

    def affine(self, bn: _BatchNorm) -> tuple[Tensor, Tensor]:
        return self.extra.value * bn.weight, self.extra.value * bn.bias

    def masked_affine(self, bn: _BatchNorm) -> tuple[Tensor, Tensor]:
        # A factor of zero makes the channel zero already, and must keep its gradient: it may come back.
        weight, bias = self.affine(bn)
        return weight.to(bn.weight.dtype), bias.to(bn.weight.dtype)

    @torch.no_grad()
    def hard(self, bn: _BatchNorm) -> Tensor:
        factors = self.extra.value.expand(bn.num_features)
        return fill_up(factors > 0, factors, self.round_to, self.floor)

    def to(self, device: torch.device) -> None:
        super().to(device)
        self.extra.to(device)


class _InnerGate(FixedGate):
    """A BatchNorm inside a residual branch, which lives as long as the branch's factor is not zero."""

    def __init__(self, extra: LearnedVector, width: int) -> None:
        super().__init__(torch.ones(width, dtype=torch.bool))
        self.extra = extra

    @torch.no_grad()
    def hard(self, bn: _BatchNorm) -> Tensor:
        return (self.extra.value > 0).expand(bn.num_features)


class SssPruner(AffinePruner):
    """Sparse Structure Selection (Huang and Wang, ECCV 2018) at work on a model.

    Every structure has a factor of at least zero that multiplies its output. Around each optimizer step the factors
    take an accelerated proximal step on ``strength * sum f``, with the optimizer's own learning rate and momentum,
    which makes some of them exactly zero. What has factor zero is dropped; there is no threshold.

    Blocks: one factor for each residual branch. It stands at the branch's last BatchNorm; where a convolution
    follows after a ReLU (pre-activation), that is the same as after the convolution. Channels: one factor for each
    channel of each BatchNorm that an activation follows.

    Args:
        model: A network with residual branches (blocks), or any with BatchNorms that an activation follows.
        example: What the model is called with: a tensor, a tuple of arguments, or (args, kwargs).
        strength: Weight of the factors' sum (the authors' gamma; 0.01 in their ImageNet configuration).
        structure: "block", "channel", or "auto": blocks where the network has residual branches, channels elsewhere.
        options: Those of every method; see :class:`softprune.methods.options.PrunerOptions`.
    """

    name = "sss"
    penalised = True

    def __init__(
        self,
        model: nn.Module,
        example: ExampleLike,
        *,
        strength: float = 0.01,
        structure: Structure = "auto",
        **options: Unpack[PrunerOptions],
    ) -> None:
        if structure not in get_args(Structure):
            raise ConfigError(
                f"`structure` must be one of {', '.join(get_args(Structure))}. Got {structure!r}."
            )
        self.structure: Structure = structure
        self.extras: dict[str, LearnedVector] = {}
        super().__init__(model, example, strength=strength, **options)

    def _read(self, model: nn.Module, example: ExampleLike, include: Globs, exclude: Globs) -> ChannelGraph:
        self.branches: dict[str, Branch] = {}
        if self.structure != "channel":
            graph = read_graph(model, example, include=include, exclude=exclude, every_norm=True)
            self.branches = residual_branches(graph)
            inside = {name for branch in self.branches.values() for name in branch.norms}
            blocks = graph.only(
                {site.name: "it is in no residual branch" for site in graph.sites if site.name not in inside}
            )
            if self.branches or self.structure == "block":
                self.structure = "block"
                return blocks
        self.structure = "channel"
        return super()._read(model, example, include, exclude)

    def _gate(self, number: int, site: Site) -> Gate:
        if self.structure == "channel":
            extra = self.extras.setdefault(site.name, LearnedVector(torch.ones(site.width)))
            return _FactorGate(extra, site.width, self.round_to, self.floor(site))
        branch = next(branch for branch in self.branches.values() if site.name in branch.norms)
        extra = self.extras.setdefault(branch.last, LearnedVector(torch.ones(1)))
        if site.name == branch.last:
            return _FactorGate(extra, site.width, 1, 0)
        return _InnerGate(extra, site.width)

    def factors(self) -> dict[str, Tensor]:
        """The factor of every structure: by the block's last BatchNorm, or per channel by site."""
        return {name: extra.value.detach().clone() for name, extra in self.extras.items()}

    def _step_vector(
        self, extra: LearnedVector, gradient: Tensor, rate: float | Tensor, momentum: float
    ) -> None:
        proximal_step_(extra.value, extra.velocity, gradient, rate, momentum, self.strength)
