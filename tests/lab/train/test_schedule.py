"""Values over the steps."""

import doctest
import math

import pytest

from softprune.errors import ConfigError
from softprune.lab.config.settings import RunConfig
from softprune.lab.train import optim as module
from softprune.lab.train.optim import Schedule
from softprune.lab.train.stage import learning_rate


def test_the_authors_learning_rate():
    rate = learning_rate(RunConfig(), 782)
    by_epoch = [rate(epoch * 782) for epoch in range(160)]
    assert [round(value, 6) for value in by_epoch] == [0.1] * 80 + [0.01] * 41 + [0.001] * 39
    assert rate(80 * 782 - 1) == 0.1
    assert rate(121 * 782 - 1) == pytest.approx(0.01)


def test_cosine_falls_from_base_to_its_end():
    rate = Schedule(base=2.0, kind="cosine", total_steps=100, final=0.1)
    assert rate(0) == 2.0
    assert rate(50) == pytest.approx(1.1)
    assert rate(100) == rate(1000) == pytest.approx(0.2)
    assert rate(25) == pytest.approx(2 * (0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2))


def test_warm_up_rises_in_equal_parts_and_then_leaves_the_schedule_alone():
    rate = Schedule(base=1.0, kind="cosine", total_steps=14, warmup_steps=4)
    assert [rate(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert rate(4) == 1.0
    assert rate(9) == pytest.approx(0.5)
    assert Schedule(base=1.0, kind="step", milestones=(6,), warmup_steps=4)(6) == pytest.approx(0.1)


def test_a_schedule_of_fine_tuning_begins_where_training_ends():
    overrides = {"epochs": 6, "schedule": "step", "milestones": (2, 4), "lr": 0.5}
    config = RunConfig()
    config = config.replace(train=config.train.replace(epochs=10), finetune=config.finetune.replace(**overrides))
    rate = learning_rate(config, 7, finetune=True)
    assert [rate(70), rate(83)] == [0.5, 0.5]
    assert [rate(84), rate(98)] == pytest.approx([0.05, 0.005])


def test_constant():
    assert [Schedule(base=0.3)(step) for step in (0, 10**6)] == [0.3, 0.3]


def test_impossible_settings():
    with pytest.raises(ConfigError, match="must end after its warm-up"):
        Schedule(base=1.0, kind="cosine", total_steps=4, warmup_steps=4)


def test_examples_in_the_documentation():
    assert doctest.testmod(module).failed == 0
