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
from softprune.graph import ChannelGraph, ExampleLike
from softprune.graph.channels import BinaryOp, ConstantOp, ForwardAnalysis, IntArray, LayerOp, NormOp, Use, per_group
from softprune.masks import Folded, MaskedBatchNorm
from softprune.methods.learned import LearnedMasks, LearnedPruner
from softprune.methods.pruner import GraphReader, PrunerOptions

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


class FactorMasks(LearnedMasks):
    """Multiply the outputs of BatchNorms by factors: one per channel or, with `branches`, one per residual branch.

    The factor of a branch stands at its last BatchNorm; the others live as long as it is not zero.
    """

    def __init__(self, pruner: "SssPruner") -> None:
        super().__init__(pruner.model, pruner.sites, pruner.clock)
        self.round_to = 1 if pruner.branches else pruner.round_to
        self.floors = torch.tensor([0 if pruner.branches else pruner.floors[site.name] for site in self.layout.sites])
        number = {name: i for i, norms in enumerate(pruner.branches.values()) for name in norms}
        self.places = [slice(number[n], number[n] + 1) for n in self.layout.members] if number else self.columns
        """The factors of each BatchNorm."""
        self.scaled = [not number or name in pruner.branches for name in self.layout.members]
        self.learn(torch.ones(len(pruner.branches) or self.layout.channels))

    def affine(self, bn: _BatchNorm, number: int) -> tuple[Tensor, Tensor]:
        if not self.scaled[number]:
            return bn.weight, bn.bias
        factors = self.value[self.places[number]].to(bn.weight.device)
        return factors * bn.weight, factors * bn.bias

    def fold(self, bn: MaskedBatchNorm) -> Folded:
        weight, bias = self.affine(bn, bn.number)
        if self.scaled[bn.number]:
            # A factor of zero makes the channel zero already, and must keep its gradient: it may come back.
            return Folded(weight.to(bn.weight.dtype), bias.to(bn.weight.dtype))
        if bn.training:
            return Folded(weight, bias)
        keep = self.value[self.places[bn.number]].to(bn.weight.device) > 0
        return Folded(torch.where(keep, weight, 0.0), torch.where(keep, bias, 0.0))

    @torch.no_grad()
    def hard(self, network: nn.Module | None = None) -> Tensor:
        value = self.value.to(self.device)
        factors = [value[place].expand(width) for place, width in zip(self.places, self.layout.widths, strict=True)]
        row = torch.cat(factors)
        return self.layout.fill_up(row > 0, row, self.round_to, self.floors.to(self.device))


class SssPruner(LearnedPruner):
    """Sparse Structure Selection (Huang and Wang, ECCV 2018) of a model.

    Every structure has a factor of at least zero that multiplies its output. Around each optimizer step the factors
    take an accelerated proximal step on ``strength * sum f``, with the optimizer's own learning rate and momentum,
    which makes some of them exactly zero. What has factor zero is dropped; there is no threshold.

    Blocks: one factor for each residual branch. It stands at the branch's last BatchNorm; where a convolution
    follows after a ReLU (pre-activation), that is the same as after the convolution. Channels: one factor for each
    channel of each BatchNorm that an activation follows.

    Args:
        strength: Weight of the factors' sum (the authors' gamma; 0.01 in their ImageNet configuration).
        structure: "block", "channel", or "auto": blocks where the network has residual branches, channels elsewhere.
    """

    name = "sss"
    description = "a factor on every residual block (or channel), pushed to zero by proximal steps"
    settings = ("structure",)
    site_masks: FactorMasks

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

    def _make_masks(self) -> FactorMasks:
        return FactorMasks(self)

    def factors(self) -> dict[str, Tensor]:
        """Return the factor of every structure: by the block's last BatchNorm, or per channel by site."""
        value = self.site_masks.value.detach().clone()
        if self.branches:
            return dict(zip(self.branches, value.split(1), strict=True))
        return self.site_masks.by_site(value)

    def _step_vector(self, gradient: Tensor, rate: float | Tensor, momentum: float) -> None:
        masks = self.site_masks
        proximal_step_(masks.value, masks.velocity, gradient, rate, momentum, self.strength)
