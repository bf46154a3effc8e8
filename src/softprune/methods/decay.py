"""Parameter groups for an optimizer: what weight decay acts on, as the authors of each method have it."""

from __future__ import annotations

from typing import Any

from torch import nn


def spare_shifts(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """SCP's authors: weights and BatchNorm scales decay, shifts and biases do not."""
    decayed: list[nn.Parameter] = []
    spared: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (spared if name.rpartition(".")[2] == "bias" else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": spared, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def all_decay(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The authors of SFP, FPGM and L1: one group, everything decays."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [{"params": parameters, "weight_decay": weight_decay}]
