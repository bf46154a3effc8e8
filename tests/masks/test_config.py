"""The constants of the masks and their rules."""

import numpy as np
import pytest

from softprune.errors import ConfigError
from softprune.masks import MaskConfig


def test_defaults_are_those_the_authors_trained_with():
    config = MaskConfig()
    assert (config.delta, config.tau, config.k, config.c, config.s) == (0.05, 0.5, 20.0, 0.95, 2.0)
    assert (config.eps, config.gate_statistics, config.use_relu) == (1e-8, "both", True)


def test_numbers_arrive_as_pythons():
    config = MaskConfig(k=np.int64(10), use_relu=np.False_)
    assert (type(config.k), config.k, config.use_relu) == (float, 10.0, False)


REFUSED = [
    ("delta", 0.0),
    ("c", float("nan")),
    ("s", -0.5),
    ("eps", 0.0),
    ("tau", True),
    ("k", "20"),
    ("gate_statistics", "variance"),
]


@pytest.mark.parametrize(("field", "value"), REFUSED)
def test_a_value_out_of_range_is_named(field, value):
    with pytest.raises(ConfigError, match=f"`{field}`"):
        MaskConfig(**{field: value})
