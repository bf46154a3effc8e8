"""Methods whose gates bring a scale and a shift of their own: a cut or a plain model has them folded in."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from softprune.masks import AffineGate
from softprune.methods.base import Pruner
from softprune.surgery import plain_copy

logger = logging.getLogger(__name__)


class AffinePruner(Pruner):
    """A pruner with some :class:`AffineGate` among its gates."""

    _half_seen = False

    def loss(self, task: Tensor) -> Tensor:
        if not self._half_seen and not torch.compiler.is_compiling() and _in_half():
            self._half_seen = True
            logger.warning(
                "float16 is usually trained with a GradScaler, which does not reach the numbers that method %r learns "
                "beside the network: their gradients stay scaled. Train in float32 or bfloat16",
                self.name,
            )
        return super().loss(task)

    def _evaluated(self, network: nn.Module) -> nn.Module:
        plain = plain_copy(network)
        _fold_into(plain, self._affine_gates())
        return plain

    def _affine_gates(self) -> dict[str, AffineGate]:
        return {name: bn.gate for name, bn in self._masked.items() if isinstance(bn.gate, AffineGate)}

    def detach(self) -> nn.Module:
        """Give the plain model back, with the method's own scales folded in; the pruner ends."""
        gates = self._affine_gates()
        model = super().detach()
        _fold_into(model, gates)
        return model


def _in_half() -> bool:
    kinds = ("cpu", "cuda")
    return any(
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16 for kind in kinds
    )


@torch.no_grad()
def _fold_into(network: nn.Module, gates: Mapping[str, AffineGate]) -> None:
    """Give the BatchNorms of a plain network the scale and shift that evaluation has."""
    for name, gate in gates.items():
        bn = network.get_submodule(name)
        assert isinstance(bn, _BatchNorm)
        training, bn.training = bn.training, False
        weight, bias = gate.affine(bn)
        bn.training = training
        bn.weight.copy_(weight)
        bn.bias.copy_(bias)
