"""The strength's rule, on made-up plants: how fast a score falls for a strength."""

import itertools
import math

import pytest

from softprune.budget.controller import REACH, Controller, first_strength

TOTAL, UPDATES = 10_000, 100


def simulate(gain, *, resistance=0.0, rate=lambda done: 1.0):
    """Return (score, strength) at every update; the strength pushes down, and what was learned pushes back."""
    controller, score, path = Controller(TOTAL), 1.0, []
    for number in range(1, UPDATES + 1):
        done = number / UPDATES
        strength = controller.update(number * TOTAL // UPDATES, score, 0.0)
        path.append((score, strength))
        push = gain * strength / first_strength(TOTAL)
        score -= rate(done) / (REACH * UPDATES) * (push - resistance * max(1 - score, 0))
        if score <= 0:
            break
    return path


@pytest.mark.parametrize("gain", [0.1, 0.3, 1.0, 5.0])
@pytest.mark.parametrize("resistance", [0.0, 0.5])
def test_the_score_is_gone_soon_after_a_third(gain, resistance):
    path = simulate(gain, resistance=resistance)
    assert len(path) <= 0.6 * UPDATES


def test_a_strength_that_does_the_work_in_time_is_left_alone():
    strengths = {strength for _, strength in simulate(1.1)}
    assert strengths == {first_strength(TOTAL)}


def test_ahead_it_does_not_fall_and_late_it_rises_by_bounded_steps():
    ahead = [strength for _, strength in simulate(5.0)]
    assert min(ahead) == first_strength(TOTAL)
    late = [strength for _, strength in simulate(0.02)]
    assert all(1 <= after / before < 1.36 for before, after in itertools.pairwise(late))
    assert late[-1] > 5 * late[0]


@pytest.mark.parametrize(
    "rate",
    [lambda done: (1 + math.cos(math.pi * done)) / 2, lambda done: 1.0 if done < 0.5 else 0.1],
    ids=["cosine", "step"],
)
def test_a_falling_learning_rate_is_made_up_for(rate):
    assert len(simulate(0.5, resistance=0.3, rate=rate)) <= 0.6 * UPDATES


def test_it_brakes_while_channels_to_keep_are_about_to_die():
    controller = Controller(1000)
    controller.update(10, 0.5, 0.0)
    before = controller.strength
    for step in range(20, 100, 10):
        controller.update(step, 0.5, 0.1)
    assert before / 4 <= controller.strength < 0.6 * before


def test_the_strength_is_bounded_whatever_happens():
    controller = Controller(1000)
    low = first_strength(1000) / 4
    for step in range(10, 1000, 10):
        assert low <= controller.update(step, 1000.0, 0.0) <= 0.02
    for step in range(10, 1000, 10):
        assert low <= controller.update(step, -1000.0, 1.0) <= 0.02


def test_the_first_strength_of_a_short_training_has_a_ceiling():
    assert first_strength(1) == first_strength(150) == 0.008
    assert first_strength(10_000) < 0.008


def test_a_strength_has_twenty_steps_to_show_its_effect():
    controller = Controller(200)
    for step in range(2, 20, 2):
        assert controller.update(step, 1.0, 0.0) == first_strength(200)
    assert controller.update(22, 1.0, 0.0) > first_strength(200)


def test_a_score_that_is_gone_raises_nothing_however_late():
    controller = Controller(1000)
    assert {controller.update(step, 0.0, 0.0) for step in range(10, 1000, 10)} == {first_strength(1000)}


def test_a_step_that_is_repeated_changes_nothing():
    controller = Controller(1000)
    for step in range(10, 500, 10):
        strength = controller.update(step, 1.0, 0.0)
    for step in (490, 100):  # again, and after a return to an earlier checkpoint
        assert controller.update(step, 1.0, 0.0) == strength


def test_it_resumes_from_its_state():
    first, second = Controller(1000), Controller(1000)
    for step in range(10, 400, 10):
        first.update(step, 1 - step / 800, 0.0)
    second.load_state_dict(first.state_dict())
    for step in range(400, 800, 10):
        assert first.update(step, 0.3, 0.0) == second.update(step, 0.3, 0.0)
