"""Sparse Structure Selection: a factor on every structure, pushed to exactly zero by a proximal step."""

import functools
import operator
from typing import Literal, Unpack, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from softprune.errors import check_choice
from softprune.graph import ChannelGraph, ExampleLike, Site
from softprune.graph.channels import IntArray
from softprune.graph.ops import BinaryOp, ConstantOp, ForwardAnalysis, LayerOp, NormOp, Use, per_group
from softprune.masks import AffineGate, FixedGate, Gate
from softprune.methods.affine import AffinePruner, LearnedVector
from softprune.methods.base import GraphReader
from softprune.methods.options import PrunerOptions
from softprune.methods.ranking import fill_up

Structure = Literal["auto", "block", "channel"]
_DATA = 1
"""The bit of values that depend on the network's input, unlike constants and parameters."""


Branches = dict[str, tuple[str, ...]]
"""Residual branches by the last BatchNorm that every path of the branch passes: dead, it makes the branch zero.

The values are all masked BatchNorms that stand in the branch alone, in the order of execution, up to that one."""


def residual_branches(graph: ChannelGraph) -> Branches:
    """Return the branches that an addition joins to a shortcut, among the sites of `graph`.

    Of the two sides of an addition, the branch is the one with more BatchNorms that the other lacks. A branch with
    no BatchNorm on all of its paths is left out, and so is one that shares a BatchNorm with another.
    """
    found = _Branches(graph)
    found.forward(graph.ops)
    return found.branches


class _Branches(ForwardAnalysis):
    """For every atom, the sites on some path from the input to it, and those on every path, one bit each."""

    def __init__(self, graph: ChannelGraph) -> None:
        sites = {site.name for site in graph.sites}
        executed = [norm.name for norm in graph.norms if norm.name in sites]
        self.bits = {name: 2 << number for number, name in enumerate(executed)}
        self.some: NDArray[np.object_] = np.full(len(graph.classes), _DATA, dtype=object)
        self.every: NDArray[np.object_] = np.zeros(len(graph.classes), dtype=object)
        for parameter in graph.free_parameters:
            self.some[parameter.atoms] = 0
        self.branches: Branches = {}
        super().__init__(self.some, self.every)

    def layer(self, op: LayerOp, use: Use) -> None:
        self.some[use.outputs] = per_group(op, use, self._on_some)
        self.every[use.outputs] = per_group(op, use, self._on_every)

    def norm(self, op: NormOp, use: Use) -> None:
        own = self.bits.get(op.name, 0)
        self.some[use.outputs] = self.some[use.inputs] | own
        self.every[use.outputs] = self.every[use.inputs] | own

    def binary(self, op: BinaryOp) -> None:
        left, right = self._on_some(op.left), self._on_some(op.right)
        self.some[op.outputs] = self.some[op.left] | self.some[op.right]
        if op.absorbs_zero:
            self.every[op.outputs] = self.every[op.left] | self.every[op.right]
            return
        self.every[op.outputs] = self.every[op.left] & self.every[op.right]
        if left & right & _DATA:
            swap = (right & ~left).bit_count() > (left & ~right).bit_count()
            own = right & ~left if swap else left & ~right
            self._add(own, gating=own & self._on_every(op.right if swap else op.left))

    def constant(self, op: ConstantOp) -> None:
        self.some[op.outputs] = 0

    def _on_some(self, atoms: IntArray) -> int:
        return functools.reduce(operator.or_, set(self.some[atoms.ravel()].tolist()), 0)

    def _on_every(self, atoms: IntArray) -> int:
        return functools.reduce(operator.and_, set(self.every[atoms.ravel()].tolist()), -1)

    def _add(self, own: int, gating: int) -> None:
        """Note the branch of the sites `own`, which ends at the last of the sites `gating` on all of its paths."""
        names = [name for name, bit in self.bits.items() if own & bit]
        last = next((name for name in reversed(names) if gating & self.bits[name]), None)
        taken = {name for norms in self.branches.values() for name in norms}
        if last is not None and not taken & set(names):
            self.branches[last] = tuple(names[: names.index(last) + 1])


@torch.no_grad()
def proximal_step_(
    factor: Tensor, velocity: Tensor, gradient: Tensor, rate: float | Tensor, momentum: float, strength: float | Tensor
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
        factors = self.extra.value.to(bn.weight.device)
        return factors * bn.weight, factors * bn.bias

    def masked_affine(self, bn: _BatchNorm) -> tuple[Tensor, Tensor]:
        # A factor of zero makes the channel zero already, and must keep its gradient: it may come back.
        weight, bias = self.affine(bn)
        return weight.to(bn.weight.dtype), bias.to(bn.weight.dtype)

    @torch.no_grad()
    def hard(self, bn: _BatchNorm) -> Tensor:
        factors = self.extra.value.to(bn.weight.device).expand(bn.num_features)
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
        return (self.extra.value.to(bn.weight.device) > 0).expand(bn.num_features)


class SssPruner(AffinePruner):
    """Sparse Structure Selection (Huang and Wang, ECCV 2018) of a model.

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
    description = "a factor on every residual block (or channel), pushed to zero by proximal steps"
    settings = ("structure",)
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
        check_choice("`structure`", structure, get_args(Structure))
        self.structure: Structure = structure
        self.extras: dict[str, LearnedVector] = {}
        super().__init__(model, example, strength=strength, **options)

    def _read(self, read: GraphReader) -> ChannelGraph:
        self.branches: Branches = {}
        if self.structure != "channel":
            graph = read(every_norm=True)
            self.branches = residual_branches(graph)
            inside = {name for norms in self.branches.values() for name in norms}
            blocks = graph.only(
                {site.name: "it is in no residual branch" for site in graph.sites if site.name not in inside}
            )
            if self.branches or self.structure == "block":
                self.structure = "block"
                return blocks
        self.structure = "channel"
        return read()

    def _gate(self, number: int, site: Site) -> Gate:
        if self.structure == "channel":
            extra = self.extras.setdefault(site.name, LearnedVector(torch.ones(site.width)))
            return _FactorGate(extra, site.width, self.round_to, self.floor(site))
        last = next(last for last, norms in self.branches.items() if site.name in norms)
        extra = self.extras.setdefault(last, LearnedVector(torch.ones(1)))
        if site.name == last:
            return _FactorGate(extra, site.width, 1, 0)
        return _InnerGate(extra, site.width)

    def factors(self) -> dict[str, Tensor]:
        """The factor of every structure: by the block's last BatchNorm, or per channel by site."""
        return {name: extra.value.detach().clone() for name, extra in self.extras.items()}

    def _step_vector(self, extra: LearnedVector, gradient: Tensor, rate: float | Tensor, momentum: float) -> None:
        proximal_step_(extra.value, extra.velocity, gradient, rate, momentum, self.strength)
