"""Methods that learn a vector of their own beside the network's parameters.

It is no parameter of the model, whose state_dict stays the same, nor of the user's optimizer. It follows the learning
rate and the momentum of the group in which the optimizer has the BatchNorms. A compact network, and the plain model
after detach(), have it folded in.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from softprune.cut import plain_copy
from softprune.devices import is_distributed
from softprune.masks import Folded, MaskedBatchNorm, StoredMasks
from softprune.methods.pruner import Pruner


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
