"""Methods that learn a vector of their own beside the network's parameters: SSS and Variational Pruning.

It is no parameter of the model, whose state_dict stays the same, nor of the user's optimizer. It follows the learning
rate and the momentum of the group in which the optimizer has the BatchNorms. A compact network, and the plain model
after detach(), have it folded in.
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
    """Stored masks with a scale and a shift of the method's own in the place of the BatchNorm's.

    What they compute stays an affine of the normalised input, so that no operation of the activation's size is added.
    """

    shared = ("keep", "value", "velocity")
    value: Tensor
    """The learned vector, and its velocity. Both change in place only."""
    velocity: Tensor

    def learn(self, start: Tensor) -> None:
        """Make the vector with these values."""
        self.value = start.to(self.device).requires_grad_()
        self.velocity = torch.zeros_like(start, device=self.device)

    def affine(self, bn: _BatchNorm, number: int, training: bool) -> tuple[Tensor, Tensor]:
        """Return scale and shift of a BatchNorm, as training draws them, or as evaluation expects them."""
        raise NotImplementedError

    def fold(self, bn: MaskedBatchNorm) -> Folded:
        keep = self.kept(bn)
        affine = self.affine(bn, bn.number, bn.training)
        return Folded(*(torch.where(keep, part, 0.0).to(bn.weight.dtype) for part in affine))

    @torch.no_grad()
    def fold_into(self, network: nn.Module) -> nn.Module:
        """Write the scale and shift of evaluation into the BatchNorms of a plain network, in place."""
        for number, name in enumerate(self.layout.members):
            bn: Any = network.get_submodule(name)
            weight, bias = self.affine(bn, number, training=False)
            bn.weight.copy_(weight)
            bn.bias.copy_(bias)
        return network


class LearnedPruner(Pruner):
    """A pruner with :class:`LearnedMasks`, whose vector takes a step before each optimizer step."""

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
        # The rate that the optimizer is about to use; a scheduler may change it after the step. Adam's first beta
        # counts as momentum.
        scale = next(iter(self.norms.values())).weight
        group = next(g for g in self._optimizer.param_groups if any(each is scale for each in g["params"]))
        momentum = float(group.get("momentum", group.get("betas", (0.0,))[0]))
        self._step_vector(gradient, group["lr"], momentum)

    def loss(self, task: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and all(bn.weight.grad is None for bn in self.norms.values()):
            # The loop has reset its gradients, perhaps without a step: of a batch with NaN, or between SAM's passes.
            self.site_masks.value.grad = None
        return super().loss(task)

    def _fold_gates(self, network: nn.Module) -> nn.Module:
        return self.site_masks.fold_into(plain_copy(network))

    def detach(self) -> nn.Module:
        """Return the plain model with the method's own scales folded in. The pruner can no longer be used."""
        return self.site_masks.fold_into(super().detach())


# --- Sparse Structure Selection ------------------------------------------------------------------------------------


def residual_branches(graph: ChannelGraph) -> list[tuple[str, ...]]:
    """Return for every branch that an addition joins to a shortcut the sites on all of its paths, as they are executed.

    The last one dead, the branch is zero. Of the two sides of an addition, the branch is the one with more sites that
    the other lacks. A branch without any is left out, and so is one that shares a site with another.
    """
    return _Branches(graph).forward(graph.ops).branches


class _Branches(ForwardAnalysis):
    """For every atom, the sites on every path from the input to it, one bit each in order of execution."""

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
        # Every output reads every input of its group, so that all outputs of a group share one fact.
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
    every_norm = True
    site_masks: FactorMasks

    def __init__(
        self, model: nn.Module, example: ExampleLike, *, strength: float = 0.01, **options: Unpack[PrunerOptions]
    ) -> None:
        super().__init__(model, example, strength=strength, **options)

    def _read(self, example: ExampleLike, **globs: Globs) -> ChannelGraph:
        graph = super()._read(example, **globs)
        self.branches = residual_branches(graph)
        """The BatchNorms of each residual branch; empty where channels have factors."""
        if not self.branches:
            self.every_norm = False
            return super()._read(example, **globs)
        inside = {name for norms in self.branches for name in norms}
        return graph.only({s.name: "it is in no residual branch" for s in graph.sites if s.name not in inside})

    def _make_masks(self) -> FactorMasks:
        return FactorMasks(self)

    def _step_vector(self, gradient: Tensor, rate: float | Tensor, momentum: float) -> None:
        masks = self.site_masks
        proximal_step_(masks.value, masks.velocity, gradient, rate, momentum, self.strength)


# --- Variational Pruning -------------------------------------------------------------------------------------------


def normal_noise(clock: Clock, words: Tensor) -> Tensor:
    """Standard normal numbers, a pure function of the clock and the words."""
    return math.sqrt(2.0) * torch.erfinv(2.0 * uniform_noise(clock, words) - 1.0)


class PosteriorMasks(LearnedMasks):
    """y = scale * (x_hat + shift), with the scale drawn from N(mu, sigma^2) in training and mu in evaluation.

    mu is the BatchNorm's own weight, the shift its bias, and the learned vector log sigma.
    """

    def affine(self, bn: _BatchNorm, number: int, training: bool) -> tuple[Tensor, Tensor]:
        scale: Tensor = bn.weight
        if training:
            here, device = self.columns[number], bn.weight.device
            scale = scale + self.value[here].to(device).exp() * normal_noise(self.clock, self.words[here].to(device))
        return scale, scale * bn.bias


class VariationalPruner(LearnedPruner):
    """Variational Pruning (Zhao et al., CVPR 2019) of a model, a reconstruction: no code of the authors exists.

    docs/methods/variational.md lists what the paper does not say and was chosen here.

    Each scale has the posterior N(mu, sigma^2) and is drawn once per channel and training forward; evaluation uses
    mu. The loss gains ``strength * sum mu^2 / (2 sigma^2)``, the divergence from a prior around zero whose variance
    is tied to the posterior's. After every epoch (call :meth:`end_epoch`), channels with |mu| and sigma below their
    thresholds are dropped permanently. The standard deviations are stepped beside the optimizer, at its learning rate
    and momentum.

    Args:
        strength: Weight of the divergence; 1 / (number of training images) would be the evidence lower bound.
        mu_below: A dropped channel's |mu| is below this.
        sigma_below: And its sigma below this.
        sigma: Standard deviation at the start. A scale that decays from 1 to 0 lets it grow by a factor of 1.4, so
            that it must start well below `sigma_below`.
    """

    name = "variational"
    description = "BatchNorm scales with a posterior; those that end at zero are removed (a reconstruction)"
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
        # A dropped channel plays no part any more; its divergence would only grow.
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
        # What was dropped before does not come back to fill a floor.
        masks.keep.copy_(masks.filled(keep, torch.where(masks.keep, mu, -1.0)))
