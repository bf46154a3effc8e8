"""L1-norm filters: the published architectures, and the smallest sums go."""

import pytest
import torch
from method_networks import Chain, batch
from torch import nn

from softprune import models
from softprune.methods import L1Pruner

IMAGE = torch.zeros(2, 3, 32, 32)


def test_the_smallest_sums_of_weights_go() -> None:
    torch.manual_seed(0)
    model = Chain(8)
    conv = model[0]
    assert isinstance(conv, nn.Conv2d)
    sums = conv.weight.detach().abs().sum((1, 2, 3))
    keep = L1Pruner(model, batch()[0], ratio=0.5).decide()["1"]
    assert sorted(sums[keep].tolist()) == sorted(sums.tolist())[4:]


# Share per stage and 1-based convolutions that stay whole (the stem is 1), and what METHODS.md says goes.
PUBLISHED = {
    "A": ((0.1, 0.1, 0.1), {16, 20, 38, 54}, 10.4, 9.3),
    "B": ((0.6, 0.3, 0.1), {16, 18, 20, 34, 38, 54}, 27.6, 13.8),
}


def test_resnet56_of_the_paper() -> None:
    torch.manual_seed(0)
    pruner = L1Pruner(models.resnet56_a(), IMAGE, exclude="bn")
    for shares, whole, macs, params in PUBLISHED.values():
        for stage in range(3):
            for block in range(9):
                share = 0.0 if 2 + 2 * (9 * stage + block) in whole else shares[stage]
                pruner.ratios[f"stages.{stage}.{block}.bn1"] = share
        plan = pruner.plan()
        assert 100 * (1 - plan.macs / plan.dense_macs) == pytest.approx(macs, abs=0.05)
        assert 100 * (1 - plan.params / plan.dense_params) == pytest.approx(params, abs=0.1)
