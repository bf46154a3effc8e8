"""The section [masks] of a recipe has the fields and the rules of MaskConfig."""

import pytest

from softprune.errors import ConfigError
from softprune.lab.config.method import MaskSection
from softprune.lab.config.schema import Section
from softprune.masks import MaskConfig


def test_a_section_makes_the_constants_that_it_names():
    assert vars(MaskSection()) == vars(MaskConfig())
    assert MaskConfig(**vars(MaskSection(tau=1, use_relu=False))) == MaskConfig(tau=1.0, use_relu=False)
    assert all(field.description for field in MaskSection.model_fields.values())


@pytest.mark.parametrize(
    ("field", "value"),
    [("delta", 1.0), ("s", -0.5), ("eps", 0.0), ("tau", True), ("gate_statistics", "variance"), ("use_relu", 1)],
)
def test_a_value_out_of_range_is_named(field, value):
    with pytest.raises(ConfigError, match=rf"masks\.{field} must .* Got "):
        MaskSection(**{field: value})


def test_a_misspelled_setting_has_a_suggestion(monkeypatch):
    monkeypatch.setattr(Section, "root", None)  # as where no recipe is read
    with pytest.raises(ConfigError, match=r"Got 'masks\.dleta'. Did you mean 'masks\.delta'"):
        MaskSection(dleta=0.1)
