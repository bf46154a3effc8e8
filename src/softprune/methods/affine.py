"""Methods whose gates bring a scale and a shift of their own: a cut or a plain model has them folded in."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from softprune.masks import AffineGate
from softprune.methods.base import Pruner
from softprune.surgery import plain_copy


class AffinePruner(Pruner):
    """A pruner with some :class:`AffineGate` among its gates."""

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
