"""Methods that learn a vector in addition to the network's parameters: SSS and Variational Pruning.

The vector is neither a parameter of the model, whose state_dict does not change, nor of the user's optimizer. It is
updated with the learning rate and momentum of the optimizer's group that contains the BatchNorms. The compact network,
and the plain model after detach(), have it folded in.
"""

import functools
import math
import operator
from typing import Any, Unpack

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from softprune.cut import plain_copy
from softprune.cut.analyses import Dependence
from softprune.cut.selection import Globs
from softprune.devices import is_distributed
from softprune.graph import ChannelGraph, ExampleLike
from softprune.graph.channels import PAD, BinaryOp, ForwardAnalysis, IntArray, LayerOp, NormOp, Use
from softprune.masks import Folded, MaskedBatchNorm, StoredMasks
from softprune.methods.options import PrunerOptions, check_positive
from softprune.methods.pruner import Pruner
from softprune.rng import Clock, uniform_noise


class LearnedMasks(StoredMasks):
    """Stored masks that replace scale and shift of the BatchNorms by those of the method.

    The output is still an affine function of the normalised input, so no operation on activations is added.
    """

    shared = ("keep", "value", "velocity")
    value: Tensor
    """The learned vector. It and its velocity change in place only."""
    velocity: Tensor

    def learn(self, start: Tensor) -> None:
        """Create the vector with these initial values."""
        self.value = start.to(self.device).requires_grad_()
        self.velocity = torch.zeros_like(start, device=self.device)

    def affine(self, bn: _BatchNorm, number: int, training: bool) -> tuple[Tensor, Tensor]:
        """Return scale and shift of a BatchNorm, sampled in training and deterministic in evaluation."""
        raise NotImplementedError

    def fold(self, bn: MaskedBatchNorm) -> Folded:
        keep = self.kept(bn)
        affine = self.affine(bn, bn.number, bn.training)
        return Folded(*(torch.where(keep, part, 0.0).to(bn.weight.dtype) for part in affine))

    @torch.no_grad()
    def fold_into(self, network: nn.Module) -> nn.Module:
        """Write scale and shift of evaluation mode to the BatchNorms of a plain network, in place."""
        for number, name in enumerate(self.layout.members):
            bn: Any = network.get_submodule(name)
            weight, bias = self.affine(bn, number, training=False)
            bn.weight.copy_(weight)
            bn.bias.copy_(bias)
        return network


class LearnedPruner(Pruner):
    """Base class of pruners with :class:`LearnedMasks`, whose vector is updated before each optimizer step."""

    site_masks: LearnedMasks
    penalised = True

    def _step_vector(self, gradient: Tensor, rate: float | Tensor, momentum: float) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def before_step(self) -> None:
        assert self._optimizer is not None
        value = self.site_masks.value
        gradient = torch.zeros_like(value) if value.grad is None else value.grad
        value.grad = None
        if is_distributed():
            dist.all_reduce(gradient)
            gradient = gradient / dist.get_world_size()
        # Use the learning rate of this step, before a scheduler changes it. Adam's first beta is its momentum.
        scale = next(iter(self.norms.values())).weight
        group = next(g for g in self._optimizer.param_groups if any(each is scale for each in g["params"]))
        momentum = float(group.get("momentum", group.get("betas", (0.0,))[0]))
        self._step_vector(gradient, group["lr"], momentum)

    def loss(self, task: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and all(bn.weight.grad is None for bn in self.norms.values()):
            # The loop has reset its gradients, maybe without a step, as after a batch with NaN or between SAM's passes.
            self.site_masks.value.grad = None
        return super().loss(task)

    def _fold_gates(self, network: nn.Module) -> nn.Module:
        return self.site_masks.fold_into(plain_copy(network))

    def detach(self) -> nn.Module:
        """Return the plain model with the method's scales folded in. The pruner cannot be used afterwards."""
        return self.site_masks.fold_into(super().detach())


# --- Sparse Structure Selection ------------------------------------------------------------------------------------


def residual_branches(graph: ChannelGraph) -> list[tuple[str, ...]]:
    """Return for each residual branch the sites that are on all of its paths, in order of execution.

    If the last of these sites is dead, the branch is zero. Of the two operands of an addition, the branch is the one
    with more sites that the other operand does not have. Branches without such sites, and branches that share a site
    with another branch, are left out.
    """
    return _Branches(graph).forward(graph.ops).branches


class _Branches(ForwardAnalysis):
    """Computes for each atom the sites on all paths from the input to it, as bits in order of execution."""

    def __init__(self, graph: ChannelGraph) -> None:
        sites = {site.name for site in graph.sites}
        executed = [norm.name for norm in graph.norms if norm.name in sites]
        self.bits = {name: 1 << number for number, name in enumerate(executed)}
        self.every: NDArray[np.object_] = np.zeros(len(graph.classes), dtype=object)
        self.every[PAD] = -1  # zero in any case
        self.is_data = Dependence(graph, set()).forward(graph.ops).depends
        self.branches: list[tuple[str, ...]] = []
        self._taken = 0
        super().__init__(self.every)

    def layer(self, op: LayerOp, use: Use) -> None:
        # Every output reads all inputs of its group, so the outputs of a group have the same sites.
        found = [self._on_all(inputs) for inputs in use.inputs.reshape(op.groups, -1)]
        self.every[use.outputs] = np.repeat(np.array(found, dtype=object), len(use.outputs) // op.groups)

    def norm(self, op: NormOp, use: Use) -> None:
        self.copy(use.inputs, use.outputs)
        self.every[use.outputs] |= self.bits.get(op.name, 0)

    def binary(self, op: BinaryOp) -> None:
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

    def _on_all(self, atoms: IntArray) -> int:
        return functools.reduce(operator.and_, set(self.every[atoms.ravel()].tolist()))


@torch.no_grad()
def proximal_step_(
    factor: Tensor, velocity: Tensor, gradient: Tensor, rate: float | Tensor, momentum: float, strength: float | Tensor
) -> None:
    """Run an accelerated proximal step with non-negative factors, in place.

    z = soft(f - rate * gradient, rate * strength); v = z - f + momentum * v; f = max(0, z + momentum * v)
    """
    moved = factor - rate * gradient
    shrunk = torch.sign(moved) * torch.clamp(moved.abs() - rate * strength, min=0.0)
    velocity.mul_(momentum).add_(shrunk - factor)
    factor.copy_(torch.clamp(shrunk + momentum * velocity, min=0.0))


class FactorMasks(LearnedMasks):
    """Multiplies the outputs of BatchNorms by factors: one per channel or, with branches, one per residual branch.

    The factor of a branch is applied at its last BatchNorm. If it is zero, all BatchNorms of the branch are masked.
    """

    def __init__(self, pruner: "SssPruner") -> None:
        rules = {} if pruner.branches else pruner._rules()
        super().__init__(pruner.model, pruner.sites, pruner.clock, **rules)
        branches, names = pruner.branches, self.layout.members
        number = {name: i for i, norms in enumerate(branches) for name in norms}
        self.places = [slice(number[n], number[n] + 1) for n in names] if branches else self.columns
        """Slice of the factors of each BatchNorm."""
        self.scaled = {norms[-1] for norms in branches} or {*names}
        """Names of the BatchNorms that are multiplied by factors."""
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
    """Sparse Structure Selection (Huang and Wang, ECCV 2018).

    The output of every structure is multiplied by a non-negative factor. Before each optimizer step, the factors take
    an accelerated proximal step on ``strength * sum f``, with the learning rate and momentum of the optimizer, which
    sets some of them exactly to zero. Structures with factor zero are removed, without a threshold.

    In a network with residual branches, each branch has one factor, applied at its last BatchNorm. If a ReLU and a
    convolution follow (pre-activation), this is equivalent to applying it after the convolution. In other networks,
    each channel of each BatchNorm followed by an activation has a factor.

    Args:
        strength: Factor of the sum of the factors (the authors' gamma; 0.01 in their ImageNet configuration).
    """

    name = "sss"
    description = "learns a factor for every residual block (or channel), set to zero by proximal steps"
    every_norm = True
    site_masks: FactorMasks

    def __init__(
        self, model: nn.Module, example: ExampleLike, *, strength: float = 0.01, **options: Unpack[PrunerOptions]
    ) -> None:
        super().__init__(model, example, strength=strength, **options)

    def _read(self, example: ExampleLike, **globs: Globs) -> ChannelGraph:
        graph = super()._read(example, **globs)
        self.branches = residual_branches(graph)
        """Names of the BatchNorms of each residual branch; empty if there is one factor per channel."""
        if not self.branches:
            self.every_norm = False
            return super()._read(example, **globs)
        inside = {name for norms in self.branches for name in norms}
        return graph.only({s.name: "it is not in a residual branch" for s in graph.sites if s.name not in inside})

    def _make_masks(self) -> FactorMasks:
        return FactorMasks(self)

    def _step_vector(self, gradient: Tensor, rate: float | Tensor, momentum: float) -> None:
        masks = self.site_masks
        proximal_step_(masks.value, masks.velocity, gradient, rate, momentum, self.strength)


# --- Variational Pruning -------------------------------------------------------------------------------------------


def normal_noise(clock: Clock, words: Tensor) -> Tensor:
    """Return standard normal noise, a pure function of the clock and the words."""
    return math.sqrt(2.0) * torch.erfinv(2.0 * uniform_noise(clock, words) - 1.0)


class PosteriorMasks(LearnedMasks):
    """Computes y = scale * (x_hat + shift), with scale sampled from N(mu, sigma^2) in training and mu in evaluation.

    mu is the weight of the BatchNorm, shift is its bias, and the learned vector is log sigma.
    """

    def affine(self, bn: _BatchNorm, number: int, training: bool) -> tuple[Tensor, Tensor]:
        scale: Tensor = bn.weight
        if training:
            here, device = self.columns[number], bn.weight.device
            scale = scale + self.value[here].to(device).exp() * normal_noise(self.clock, self.words[here].to(device))
        return scale, scale * bn.bias


class VariationalPruner(LearnedPruner):
    """Variational Pruning (Zhao et al., CVPR 2019), reconstructed without code of the authors.

    docs/methods/variational.md lists the details that the paper leaves open and how they are chosen here.

    Each scale has the posterior N(mu, sigma^2) and is sampled once per channel and training forward pass; evaluation
    uses mu. The loss has the additional term ``strength * sum mu^2 / (2 sigma^2)``, the divergence from a prior with
    mean zero whose variance is tied to that of the posterior. After every epoch (call :meth:`end_epoch`), channels with
    |mu| and sigma below their thresholds are removed permanently. The standard deviations are updated separately from
    the optimizer, with its learning rate and momentum.

    Args:
        strength: Factor of the divergence; 1 / (number of training images) gives the evidence lower bound.
        mu_below: Threshold of |mu| for removing a channel.
        sigma_below: Threshold of sigma for removing a channel.
        sigma: Initial standard deviation. It grows by a factor of 1.4 while a scale decays from 1 to 0, so it must
            start well below `sigma_below`.
    """

    name = "variational"
    description = "learns a posterior for BatchNorm scales and removes those close to zero (a reconstruction)"
    settings = ("mu_below", "sigma_below")
    site_masks: PosteriorMasks

    def __init__(
        self,
        model: nn.Module,
        example: ExampleLike,
        *,
        strength: float = 2e-6,
        mu_below: float = 0.02,
        sigma_below: float = 0.01,
        sigma: float = 0.005,
        **options: Unpack[PrunerOptions],
    ) -> None:
        self.mu_below = check_positive("mu_below", mu_below)
        self.sigma_below = check_positive("sigma_below", sigma_below)
        self._sigma = check_positive("sigma", sigma)
        super().__init__(model, example, strength=strength, **options)

    def _make_masks(self) -> PosteriorMasks:
        masks = PosteriorMasks(self.model, self.sites, self.clock, **self._rules())
        masks.learn(torch.full((masks.layout.channels,), math.log(self._sigma)))
        return masks

    def _extra_loss(self) -> Tensor:
        # Leave out removed channels, whose divergence would only grow.
        masks = self.site_masks
        ratio = masks.row({name: bn.weight for name, bn in self.norms.items()}) / masks.value.exp()
        return self.strength * 0.5 * torch.where(masks.keep, ratio**2, 0.0).sum()

    def _step_vector(self, gradient: Tensor, rate: float | Tensor, momentum: float) -> None:
        masks = self.site_masks
        masks.velocity.mul_(momentum).add_(gradient)
        masks.value.sub_(rate * masks.velocity)

    @torch.no_grad()
    def end_epoch(self, epoch: int) -> None:
        masks = self.site_masks
        mu = masks.row({name: bn.weight.abs() for name, bn in self.norms.items()})
        keep = masks.keep & ~((mu < self.mu_below) & (masks.value.exp() < self.sigma_below))
        # Channels removed earlier must not return to fill a floor.
        masks.keep.copy_(masks.filled(keep, torch.where(masks.keep, mu, -1.0)))
