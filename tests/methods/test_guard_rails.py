"""Mistakes that a loop of one's own makes easily are said."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from method_networks import Chain, batch, sgd, train
from torch import nn

from softprune import models
from softprune.errors import ModelError, SoftpruneError
from softprune.masks import MaskConfig, is_masked
from softprune.methods import REGISTRY, SoftPruner


@pytest.mark.parametrize("attached", [True, False])
def test_a_forgotten_optimizer_is_said_once(attached: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = models.build("digits_net", 10)
    images = torch.randn(4, 1, 8, 8)
    pruner = SoftPruner(model, images)
    optimizer = torch.optim.SGD(pruner.parameter_groups(), lr=0.1)
    if attached:
        pruner.attach(optimizer)
    for _ in range(4):
        pruner.loss(nn.functional.cross_entropy(model(images), torch.zeros(4, dtype=torch.long))).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert caplog.text.count("call pruner.attach(optimizer)") == (not attached)


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        ("slimming", {"initial_scale": math.nan}, "`initial_scale` must be a number above 0, or None. Got nan"),
        ("slimming", {"initial_scale": "a"}, "Got 'a'"),
        ("variational", {"sigma": "a"}, "`sigma` must be a number above 0. Got 'a'"),
        ("variational", {"mu_below": None}, "`mu_below` must be a number above 0. Got None"),
        ("fpgm", {"mask_gradients": "no"}, "`mask_gradients` must be True or False. Got 'no'"),
        ("l1", {"ratio": {5: 0.5}}, "must name sites of the model. Got 5"),
        ("scratch", {"plan": 5}, "or the folder of a run. Got 5"),
    ],
)
def test_an_option_of_the_wrong_kind(method: str, options: dict[str, Any], said: str) -> None:
    model = Chain()
    with pytest.raises(SoftpruneError, match=re.escape(said)):
        REGISTRY[method](model, batch()[0], **options)
    assert not any(is_masked(module) for module in model.modules())


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (
            "scp",
            {"strength": np.float32(1e-4), "round_to": np.int64(2), "min_channels": np.int32(2), "seed": np.int64(3)},
        ),
        ("scp", {"target": {"macs": np.float32(0.5)}, "total_steps": np.int64(8), "final_at": np.float32(0.5)}),
        ("scp", {"target": {"macs": 0.5}, "total_steps": 8, "cost_weighting": np.float32(0.5)}),
        ("scp", {"masks": MaskConfig(delta=np.float32(0.125))}),
        ("slimming", {"ratio": np.float32(0.5), "initial_scale": np.float32(0.5)}),
        ("fpgm", {"ratio_dist": {"*": np.float32(0.25)}, "mask_gradients": np.True_}),
    ],
)
def test_a_pruner_takes_numbers_of_numpy_and_keeps_none(method: str, options: dict[str, Any], tmp_path: Path) -> None:
    pruner = REGISTRY[method](Chain(), batch()[0], **options)
    torch.save(pruner.state_dict(), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True)["method"] == method
    if pruner.target is None:
        pruner.strength = np.float32(1e-3)
        assert pruner.plan(round_to=np.int64(2), gathers=np.True_).to_json()


def test_training_that_diverges_under_a_target_is_told_so() -> None:
    pruner = REGISTRY["scp"](Chain(), batch()[0], target={"macs": 0.5}, total_steps=100)
    optimizer = sgd(pruner)
    train(pruner, optimizer, 2)
    with torch.no_grad():
        next(iter(pruner.model.parameters())).fill_(torch.nan)
    with pytest.raises(ModelError, match=r"must be finite.*before training diverged"):
        train(pruner, optimizer, 5, first=2)
