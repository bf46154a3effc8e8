"""Networks whose pruner is still at work are refused in the same words everywhere."""

import pytest
import torch
from torch import nn

import softprune as sp
from softprune.bench import compare_latency
from softprune.errors import ModelError
from softprune.export import fold_batch_norms
from softprune.masks import check_unmasked


def test_the_rule_what_was_got_and_what_to_do() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 3))
    images = torch.randn(2, 3, 8, 8)
    pruner = sp.SoftPruner(model, images)
    for call in (
        lambda: check_unmasked(model, "a walk"),
        lambda: fold_batch_norms(model, images),
        lambda: sp.inspect(model, images),
        lambda: compare_latency(model, model, images),
    ):
        with pytest.raises(ModelError, match=r"without masks.*detach\(\)"):
            call()
    check_unmasked(pruner.detach(), "a walk")
