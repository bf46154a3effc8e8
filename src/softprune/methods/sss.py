"""Sparse Structure Selection: a factor on every structure, pushed to exactly zero by a proximal step."""

import functools
import operator
from typing import Any, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from softprune.graph import ChannelGraph, ExampleLike
from softprune.graph.channels import (
    PAD,
    BinaryOp,
    ConstantOp,
    ForwardAnalysis,
    IntArray,
    LayerOp,
    NormOp,
    Use,
    per_group,
)
from softprune.methods.learned import LearnedMasks, LearnedPruner
from softprune.methods.options import PrunerOptions


def residual_branches(graph: ChannelGraph) -> list[tuple[str, ...]]:
    """Return for every branch that an addition joins to a shortcut the sites on all of its paths, as they are executed.

    The last one dead, the branch is zero. Of the two sides of an addition, the branch is the one with more sites that
    the other lacks. A branch without any is left out, and so is one that shares a site with another.
    """
    found = _Branches(graph)
    found.forward(graph.ops)
    return found.branches


class _Branches(ForwardAnalysis):
    """For every atom, the sites on every path from the input to it, one bit each in order of execution."""

    def __init__(self, graph: ChannelGraph) -> None:
        sites = {site.name for site in graph.sites}
        executed = [norm.name for norm in graph.norms if norm.name in sites]
        self.bits = {name: 1 << number for number, name in enumerate(executed)}
        self.every: NDArray[np.object_] = np.zeros(len(graph.classes), dtype=object)
        self.is_data = np.ones(len(graph.classes), dtype=bool)
        """What depends on the network's input, unlike constants and parameters."""
        for parameter in graph.free_parameters.values():
            self.is_data[parameter.atoms] = False
        self.every[PAD], self.is_data[PAD] = -1, False  # zero in any case
        self.branches: list[tuple[str, ...]] = []
        self._taken = 0
        super().__init__(self.every, self.is_data)

    def layer(self, op: LayerOp, use: Use) -> None:
        self.every[use.outputs] = per_group(op, use, self._on_all)
        self.is_data[use.outputs] = per_group(op, use, lambda inputs: self.is_data[inputs].any())

    def norm(self, op: NormOp, use: Use) -> None:
        self.copy(use.inputs, use.outputs)
        self.every[use.outputs] |= self.bits.get(op.name, 0)

    def binary(self, op: BinaryOp) -> None:
        self.is_data[op.outputs] = self.is_data[op.left] | self.is_data[op.right]
        if op.absorbs_zero:
            self.every[op.outputs] = self.every[op.left] | self.every[op.right]
            return
        self.every[op.outputs] = self.every[op.left] & self.every[op.right]
        if self.is_data[op.left].any() and self.is_data[op.right].any():
            left, right = self._on_all(op.left), self._on_all(op.right)
            branch = max(left & ~right, right & ~left, key=int.bit_count)
            if branch and not branch & self._taken:
                self._taken |= branch
                self.branches.append(tuple(name for name, bit in self.bits.items() if branch & bit))

    def constant(self, op: ConstantOp) -> None:
        self.is_data[op.outputs] = False

    def _on_all(self, atoms: IntArray) -> int:
        return functools.reduce(operator.and_, set(self.every[atoms.ravel()].tolist()))


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
    """Multiply the outputs of BatchNorms by factors: one per channel or, with branches, one per residual branch.

    The factor of a branch stands at its last BatchNorm; the others live as long as it is not zero.
    """

    def __init__(self, pruner: "SssPruner") -> None:
        rules = {} if pruner.branches else pruner._rules()
        super().__init__(pruner.model, pruner.sites, pruner.clock, **rules)
        branches, names = pruner.branches, self.layout.members
        number = {name: i for i, norms in enumerate(branches) for name in norms}
        self.places = [slice(number[n], number[n] + 1) for n in names] if branches else self.columns
        """The factors of each BatchNorm."""
        self.scaled = {norms[-1] for norms in branches} or {*names}
        """The BatchNorms at which factors stand."""
        self.learn(torch.ones(len(branches) or self.layout.channels))

    def affine(self, bn: _BatchNorm, number: int, training: bool) -> tuple[Tensor, Tensor]:
        if self.layout.members[number] not in self.scaled:
            return bn.weight, bn.bias
        factors = self.value[self.places[number]].to(bn.weight.device)
        return factors * bn.weight, factors * bn.bias

    @torch.no_grad()
    def hard(self, network: nn.Module | None = None) -> Tensor:
        value = self.value.to(self.device)
        factors = [value[place].expand(width) for place, width in zip(self.places, self.layout.widths, strict=True)]
        row = torch.cat(factors)
        return self.filled(row > 0, row)


class SssPruner(LearnedPruner):
    """Sparse Structure Selection (Huang and Wang, ECCV 2018) of a model.

    Every structure has a factor of at least zero that multiplies its output. Around each optimizer step the factors
    take an accelerated proximal step on ``strength * sum f``, with the optimizer's own learning rate and momentum,
    which makes some of them exactly zero. What has factor zero is dropped; there is no threshold.

    A network with residual branches has one factor for each. It stands at the branch's last BatchNorm; where a
    convolution follows after a ReLU (pre-activation), that is the same as after the convolution. Other networks have
    one factor for each channel of each BatchNorm that an activation follows.

    Args:
        strength: Weight of the factors' sum (the authors' gamma; 0.01 in their ImageNet configuration).
    """

    name = "sss"
    description = "a factor on every residual block (or channel), pushed to zero by proximal steps"
    site_masks: FactorMasks

    def __init__(
        self, model: nn.Module, example: ExampleLike, *, strength: float = 0.01, **options: Unpack[PrunerOptions]
    ) -> None:
        super().__init__(model, example, strength=strength, **options)

    def _read(self, example: ExampleLike, **options: Any) -> ChannelGraph:
        graph = super()._read(example, every_norm=True, **options)
        self.branches = residual_branches(graph)
        """The BatchNorms of each residual branch; empty where channels have factors."""
        if not self.branches:
            return super()._read(example, **options)
        inside = {name for norms in self.branches for name in norms}
        return graph.only({s.name: "it is in no residual branch" for s in graph.sites if s.name not in inside})

    def _make_masks(self) -> FactorMasks:
        return FactorMasks(self)

    def _step_vector(self, gradient: Tensor, rate: float | Tensor, momentum: float) -> None:
        masks = self.site_masks
        proximal_step_(masks.value, masks.velocity, gradient, rate, momentum, self.strength)
