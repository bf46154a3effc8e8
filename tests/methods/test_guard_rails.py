"""Mistakes that a loop of one's own makes easily are said."""

import pytest
import torch
from torch import nn

from softprune import models
from softprune.methods import SoftPruner


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
