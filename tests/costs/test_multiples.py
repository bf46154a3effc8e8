"""`round_to="auto"`: the multiple whose rounded-up widths take the least time."""

import pytest
import torch
from torch import nn

from softprune import SoftPruner, models
from softprune.costs import fastest_multiple, multiples
from softprune.costs.multiples import MULTIPLES, WIDTHS, choose_multiple, multiple_costs, round_up, time_widths
from softprune.errors import ConfigError


@pytest.mark.parametrize(
    ("time_of", "best"),
    [
        (lambda width: width * width, 1),  # nothing but arithmetic: every added channel costs
        (lambda width: round_up(width, 8) ** 2, 8),  # a machine that computes eight at a time anyway
        (lambda width: width * width * (1 if width % 16 == 0 else 2), 16),  # one that is slow on all else
        (lambda width: 1.0, MULTIPLES[-1]),  # no difference: channels cost nothing
    ],
)
def test_the_best_multiple_of_a_known_machine(time_of, best: int) -> None:
    totals = multiple_costs(time_of)
    assert list(totals) == list(MULTIPLES)
    assert choose_multiple(totals) == best


def test_of_multiples_within_one_percent_the_largest_is_taken() -> None:
    assert choose_multiple({1: 1.0, 4: 1.005, 8: 1.009, 16: 1.02, 32: 2.0}) == 8


def test_widths_are_timed_on_this_machine() -> None:
    times = time_widths([8, 64], "cpu", torch.float32)
    assert 0 < times[8] < times[64]


def test_it_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def timed(widths, device, dtype):
        calls.append(device)
        return {width: round_up(width, 4) ** 2 * (1 if width % 4 == 0 else 1.5) for width in widths}

    monkeypatch.setattr(multiples, "time_widths", timed)
    multiples._fastest.cache_clear()
    try:
        assert fastest_multiple() == fastest_multiple("cpu") == 4
        assert calls == ["cpu"]
        pruner = SoftPruner(models.build("digits_net", 10), torch.randn(2, 1, 8, 8), round_to="auto")
        assert pruner.round_to == 4
        assert pruner.site_masks.round_to == 4
    finally:
        multiples._fastest.cache_clear()


def test_mistakes() -> None:
    with pytest.raises(ConfigError, match="round_to"):
        SoftPruner(models.build("digits_net", 10), torch.randn(2, 1, 8, 8), round_to="fast")
    assert len(set(WIDTHS)) == len(WIDTHS)


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
    assert multiples.fitting_multiple(16, widths, required) == expected


def test_a_chain_can_still_meet_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("softprune.methods.pruner.fastest_multiple", lambda *_: 16)
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    chain = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    example = torch.randn(2, 3, 8, 8)
    pruner = SoftPruner(chain, example, round_to="auto", target={"macs": 0.15}, total_steps=10)
    assert pruner.round_to == 8
