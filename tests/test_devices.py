"""The multiple of channels that a device and a network get."""

import logging

import pytest
import torch
from torch import nn

from softprune import SoftPruner
from softprune.devices import fitting_multiple


@pytest.mark.parametrize(
    ("widths", "required", "expected"),
    [
        ([64] * 4, 4, 16),
        ([16, 32, 64], 3, 8),
        ([16, 32, 64], 1, 16),
        ([16, 32, 32, 64], 4, 16),
        ([16, 16, 32, 64], 0, 8),
        ([8, 8, 8], 3, 4),
        ([1, 1], 2, 1),
    ],
)
def test_a_multiple_fits_most_layers_twice(widths: list[int], required: int, expected: int) -> None:
    assert fitting_multiple(16, widths, required) == expected


def test_a_chain_can_still_meet_its_budget(caplog: pytest.LogCaptureFixture) -> None:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    chain = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    with caplog.at_level(logging.INFO, logger="softprune"):
        pruner = SoftPruner(chain, torch.randn(2, 3, 8, 8), round_to="auto", target={"macs": 0.15}, total_steps=10)
    assert pruner.round_to == pruner.site_masks.round_to == 8
    assert "multiples of 8" in caplog.text
    assert "round_to=1" in caplog.text
