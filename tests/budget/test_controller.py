"""The strength's rule, on made-up plants: how fast a margin falls for a strength."""

import math

import pytest

from softprune.budget import Controller, first_strength
from softprune.budget.controller import REACH

TOTAL, LOOKS = 10_000, 100
START = 2.9
"""The margin of untrained channels."""


def simulate(gain, *, resistance=0.0, rate=lambda done: 1.0):
    """Margins at every look; the strength pushes down, and what the network has learned pushes back."""
    controller, margin, margins = Controller(TOTAL), START, []
    every = TOTAL // LOOKS
    for look in range(1, LOOKS + 1):
        margins.append(margin)
        strength = controller.update(look * every, margin)
        done = look / LOOKS
        push = gain * strength / first_strength(TOTAL)
        margin -= START / (REACH * LOOKS) * rate(done) * (push - resistance * max(START - margin, 0))
    return margins, controller


@pytest.mark.parametrize("gain", [0.03, 0.3, 1.0, 5.0])
@pytest.mark.parametrize("resistance", [0.0, 0.5])
def test_the_margin_is_gone_when_half_is_done(gain, resistance):
    margins, _ = simulate(gain, resistance=resistance)
    middle = margins[LOOKS // 2 : LOOKS // 2 + 20]
    assert max(map(abs, middle)) < 0.45
    assert max(map(abs, margins[-20:])) < 0.45


@pytest.mark.parametrize(
    "rate",
    [lambda done: (1 + math.cos(math.pi * done)) / 2, lambda done: 1.0 if done < 0.5 else 0.1],
    ids=["cosine", "step"],
)
def test_a_falling_learning_rate_does_not_upset_it(rate):
    margins, _ = simulate(0.5, resistance=0.3, rate=rate)
    assert abs(margins[LOOKS // 2]) < 0.35
    assert max(map(abs, margins[LOOKS // 2 :])) < 0.6


def test_the_strength_is_bounded_whatever_happens():
    controller = Controller(1000)
    low, high = first_strength(1000) / 1001, first_strength(1000) * 1001
    for step in range(10, 1000, 10):
        assert low <= controller.update(step, 1000.0) <= high
    for step in range(10, 1000, 10):
        assert low <= controller.update(step, -1000.0) <= high


def test_it_goes_on_from_its_state():
    first, second = Controller(1000), Controller(1000)
    for step in range(10, 400, 10):
        first.update(step, 2.9 - step / 200)
    second.load_state_dict(first.state_dict())
    for step in range(400, 800, 10):
        assert first.update(step, 0.3) == second.update(step, 0.3)
