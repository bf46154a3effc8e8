"""Sections of a recipe: what is refused, and what the message names."""

from typing import Any

import pytest
from pydantic import ValidationError

from softprune.errors import ConfigError
from softprune.lab.config.method import MethodConfig
from softprune.lab.config.schema import keys_of
from softprune.lab.config.settings import OptimizerConfig, RunConfig, ScheduleConfig


def test_values_become_what_the_annotations_say() -> None:
    config = RunConfig(seed=3, optimizer={"lr": 1}, schedule={"milestones": [1, 2]})
    assert config == RunConfig(seed=3, optimizer=OptimizerConfig(lr=1.0), schedule=ScheduleConfig(milestones=(1, 2)))
    assert isinstance(config.optimizer.lr, float)


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"sed": 1}, ["'sed'", "Did you mean 'seed'?"]),
        ({"optimizer": {"lrr": 1}}, ["'optimizer.lrr'", "Did you mean 'optimizer.lr'?"]),
        ({"method": {"target": 0.5}}, ["method.target must be a table. Got 0.5. Write method.target.NAME ="]),
        ({"nesterov": True}, ["'nesterov'", "Did you mean 'optimizer.nesterov'?"]),
        ({"train": {"lr": 1}}, ["'train.lr'", "Did you mean 'optimizer.lr' or 'finetune.lr'?"]),
        ({"distill": {"zzz": 1}}, ["Known here: distill.teacher, distill.weight, distill.temperature"]),
        ({"seed": "many"}, ["seed must be a whole number", "Got 'many' (text)"]),
        ({"seed": True}, ["seed must be a whole number", "true/false"]),
        ({"seed": 1.5}, ["seed must be a whole number", "Got 1.5"]),
        ({"seed": -1}, ["seed must be a whole number, at least 0 and less than 2147483648", "Got -1"]),
        ({"seed": 10**5000}, ["seed must be a whole number", "Got a very large whole number"]),
        ({"optimizer": 3}, ["optimizer is a section"]),
        ({"train": {"label_smoothing": 1.0}}, ["train.label_smoothing must be a number, at least 0 and less than 1"]),
        ({"train": {"label_smoothing": float("nan")}}, ["train.label_smoothing must be a finite number", "Got nan"]),
        ({"schedule": {"kind": "cosin"}}, ['one of "step", "cosine", "constant"', "Did you mean 'cosine'?"]),
        ({"schedule": {"milestones": 3}}, ["schedule.milestones must be a list"]),
        ({"schedule": {"milestones": [3, 0]}}, ["schedule.milestones[1] must be a whole number, at least 1"]),
        ({"method": {"round_to": 0}}, ['method.round_to must be a whole number, at least 1, or "auto"']),
        ({"method": {"round_to": "aut"}}, ["Did you mean 'auto'?"]),
        ({"method": {"target": {"macs": []}}}, ["method.target.macs must be a number or text"]),
        ({"method": {"options": {"x": float("inf")}}}, ["method.options.x must be"]),
    ],
)
def test_errors_name_the_key_the_rule_and_the_nearest(values: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig(**values)
    for part in parts:
        assert part in str(caught.value)


def test_a_section_made_in_python_names_its_key_too() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.lr must be a number, more than 0\. Got -1"):
        OptimizerConfig(lr=-1)
    with pytest.raises(ConfigError, match=r"Got 'method\.lr'\. Did you mean 'optimizer\.lr'"):
        MethodConfig(lr=1)


def test_sections_are_immutable_and_replace_checks() -> None:
    config = OptimizerConfig()
    with pytest.raises(ValidationError, match="frozen"):
        config.lr = 1.0
    assert config.replace(lr=1.0) == OptimizerConfig(lr=1.0)
    with pytest.raises(ConfigError, match=r"optimizer\.lr must be"):
        config.replace(lr=0.0)


def test_keys_are_listed_in_the_order_of_the_file() -> None:
    keys = [key for key, _ in keys_of(RunConfig)]
    assert keys[:4] == ["name", "seed", "model.name", "model.options"]
    assert "masks.delta" in keys
