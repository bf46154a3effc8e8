"""Sections of a recipe: what is refused, and what the message names."""

from typing import Any

import pytest
from pydantic import ValidationError

from softprune.errors import ConfigError
from softprune.lab.config import settings
from softprune.lab.config.settings import OptimizerConfig, RunConfig
from softprune.mask_config import MaskConfig


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"sed": 1}, ["'sed'", "Did you mean 'seed'?"]),
        ({"optimizer": {"lrr": 1}}, ["'optimizer.lrr'", "Did you mean 'optimizer.lr'?"]),
        ({"method": {"target": 0.5}}, ["method.target must be a valid table", "Got 0.5. Write method.target.NAME ="]),
        ({"train": {"lr": 1}}, ["'train.lr'", "Did you mean 'optimizer.lr' or 'finetune.lr'?"]),
        ({"distill": {"zzz": 1}}, ["Known here: distill.teacher, distill.weight, distill.temperature"]),
        ({"seed": "many"}, ["seed must be a valid integer", "Got 'many'"]),
        ({"seed": -1}, ["seed must be greater than or equal to 0", "Got -1"]),
        ({"seed": 10**5000}, ["seed must be less than", "Got a very large int"]),
        ({"optimizer": 3}, ["optimizer is a section"]),
        ({"train": {"label_smoothing": float("nan")}}, ["train.label_smoothing must be a finite number", "Got nan"]),
        ({"schedule": {"kind": "cosin"}}, ["'step', 'cosine' or 'constant'"]),
        ({"schedule": {"milestones": [3, 0]}}, ["schedule.milestones[1] must be greater than or equal to 1"]),
        ({"method": {"round_to": 0}}, ["method.round_to must be greater than or equal to 1"]),
        ({"method": {"target": {"macs": []}}}, ["method.target.macs must be a valid number"]),
        ({"method": {"options": {"x": float("inf")}}}, ["method.options.x must be"]),
    ],
)
def test_errors_name_the_key_the_rule_and_the_nearest(values: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig(**values)
    for part in parts:
        assert part in str(caught.value)


def test_sections_are_immutable_and_replace_checks() -> None:
    config = OptimizerConfig()
    with pytest.raises(ValidationError, match="frozen"):
        config.lr = 1.0
    assert config.replace(lr=1.0) == OptimizerConfig(lr=1.0)
    with pytest.raises(ConfigError, match=r"optimizer\.lr must be"):
        config.replace(lr=0.0)


def test_the_constants_of_masks_have_the_defaults_and_the_rules_of_the_library() -> None:
    section, constants = settings.MaskSection(), MaskConfig()
    assert vars(section).items() <= vars(constants).items()
    assert MaskConfig(**vars(section)) == constants
    assert all(field.description for field in settings.MaskSection.model_fields.values())
