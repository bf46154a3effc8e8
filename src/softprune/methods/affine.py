"""Methods that learn a scale or a shift of their own beside the network's parameters.

These vectors (factors, standard deviations) are no parameters of the model, whose state_dict stays the same, nor of
the user's optimizer. They follow the learning rate and the momentum of the group in which the optimizer has the
BatchNorms. A compact network, and the plain model after detach(), have them folded in.
"""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from softprune.cut import plain_copy
from softprune.distributed import is_distributed
from softprune.masks import AffineGate
from softprune.methods.base import Pruner


class LearnedVector(nn.Module):
    """A learned vector and its velocity, outside the model. Both change in place only."""

    velocity: Tensor
    is_copy = False

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = nn.Parameter(value.clone())
        self.register_buffer("velocity", torch.zeros_like(value))

    def __deepcopy__(self, memo: dict[int, Any]) -> "LearnedVector":
        """Return one with the same memory for the values: a copy of the model (an EMA, say) shares them."""
        made = memo[id(self)] = LearnedVector(self.velocity)
        made.value.data = self.value.data
        made.is_copy = True
        return made

    def _apply(self, fn: Any, recurse: bool = True) -> "LearnedVector":
        # A copy that is moved to another device still shares the values.
        return self if self.is_copy else super()._apply(fn, recurse)


def take_gradients(vectors: Iterable[LearnedVector]) -> list[Tensor]:
    """Return the gradients since the last step, averaged over all processes in one exchange, and reset them."""
    gradients = []
    for vector in vectors:
        gradients.append(torch.zeros_like(vector.velocity) if vector.value.grad is None else vector.value.grad)
        vector.value.grad = None
    if not is_distributed():
        return gradients
    together = torch.cat(gradients)
    dist.all_reduce(together)
    return list((together / dist.get_world_size()).split([len(each) for each in gradients]))


def rates_of(optimizer: Optimizer, parameters: Iterable[Tensor]) -> list[tuple[float | Tensor, float]]:
    """Return (learning rate, momentum) of each parameter's group; Adam's first beta counts as momentum."""
    groups = {id(member): group for group in optimizer.param_groups for member in group["params"]}
    return [
        (group["lr"], float(group.get("momentum", group.get("betas", (0.0,))[0])))
        for group in (groups[id(parameter)] for parameter in parameters)
    ]


class AffinePruner(Pruner):
    """A pruner with at least one :class:`AffineGate`, whose vectors take a step before each optimizer step."""

    extras: dict[str, LearnedVector]
    """The learned vectors, by the site at whose learning rate they are stepped."""

    def _step_vector(self, extra: LearnedVector, gradient: Tensor, rate: float | Tensor, momentum: float) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def before_step(self) -> None:
        # The rate that the optimizer is about to use; a scheduler may change it after the step.
        assert self._optimizer_hooks is not None
        gradients = take_gradients(self.extras.values())
        rates = rates_of(self._optimizer_hooks.optimizer, (self.norms[name].weight for name in self.extras))
        for extra, gradient, (rate, momentum) in zip(self.extras.values(), gradients, rates, strict=True):
            self._step_vector(extra, gradient, rate, momentum)

    def loss(self, task: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and all(bn.weight.grad is None for bn in self.norms.values()):
            # The loop has reset its gradients, perhaps without a step: of a batch with NaN, or between SAM's passes.
            for extra in self.extras.values():
                extra.value.grad = None
        return super().loss(task)

    def _fold_gates(self, network: nn.Module) -> nn.Module:
        plain = plain_copy(network)
        _fold_into(plain, self._affine_gates())
        return plain

    def _affine_gates(self) -> dict[str, AffineGate]:
        return {name: bn.gate for name, bn in self.norms.items() if isinstance(bn.gate, AffineGate)}

    def detach(self) -> nn.Module:
        """Return the plain model with the method's own scales folded in. The pruner can no longer be used."""
        gates = self._affine_gates()
        model = super().detach()
        _fold_into(model, gates)
        return model

    def state_dict(self) -> dict[str, Any]:
        extras = {name: dict(extra.state_dict()) for name, extra in self.extras.items()}
        return {**super().state_dict(), "extras": copy.deepcopy(extras)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for name, extra in self.extras.items():
            extra.load_state_dict(state["extras"][name])


@torch.no_grad()
def _fold_into(network: nn.Module, gates: Mapping[str, AffineGate]) -> None:
    """Write the scale and shift of evaluation into the BatchNorms of a plain network."""
    for name, gate in gates.items():
        bn = network.get_submodule(name)
        assert isinstance(bn, _BatchNorm)
        training, bn.training = bn.training, False
        weight, bias = gate.affine(bn)
        bn.training = training
        bn.weight.copy_(weight)
        bn.bias.copy_(bias)
