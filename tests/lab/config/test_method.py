"""The constants of the masks and their rules."""

import pytest
from pydantic import ValidationError

from softprune.errors import ConfigError
from softprune.lab.config.schema import Section
from softprune.masks import MaskConfig


def test_defaults_are_those_the_authors_trained_with():
    config = MaskConfig()
    assert (config.delta, config.tau, config.k, config.c, config.s) == (0.05, 0.5, 20.0, 0.95, 2.0)
    assert (config.eps, config.gate_statistics, config.use_relu) == (1e-8, "both", True)


def test_is_frozen_and_keyword_only():
    with pytest.raises(ValidationError, match="frozen"):
        MaskConfig().delta = 0.1
    with pytest.raises(TypeError):
        MaskConfig(0.1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("delta", 0.0),
        ("delta", 1.0),
        ("delta_two_sided", -0.1),
        ("tau", 0.0),
        ("k", -1),
        ("c", 1.0),
        ("c", float("nan")),
        ("s", -0.5),
        ("eps", 0.0),
        ("eps", float("inf")),
        ("tau", True),
        ("k", "20"),
        ("gate_statistics", "variance"),
        ("use_relu", 1),
    ],
)
def test_a_value_out_of_range_is_named(field, value):
    with pytest.raises(ConfigError, match=rf"masks\.{field} must .* Got "):
        MaskConfig(**{field: value})


def test_a_misspelled_setting_has_a_suggestion_in_python_too(monkeypatch):
    monkeypatch.setattr(Section, "root", None)  # as where no recipe is read
    with pytest.raises(ConfigError, match=r"Got 'masks\.dleta'. Did you mean 'masks\.delta'"):
        MaskConfig(dleta=0.1)
