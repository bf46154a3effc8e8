"""The factors by which costly channels are pushed harder, on costs made up for the purpose."""

import pytest
import torch

from softprune.budget.weighting import CostWeights
from softprune.errors import ConfigError


class Prices:
    """A measure: every channel of a site has its price. Counts how often it is asked."""

    def __init__(self, **prices):
        self.prices, self.asked = prices, 0

    def __call__(self, network, masks):
        self.asked += 1
        return float(sum(self.prices[name] * int(mask.sum()) for name, mask in masks.items()))


def masks(**counts):
    return {name: torch.arange(10) < count for name, count in counts.items()}


def weights_of(exponent, measure):
    return CostWeights(exponent, measure, dict.fromkeys(measure.prices, 10))


@pytest.mark.parametrize(("exponent", "ratio"), [(0.0, 1.0), (0.5, 2.0), (1.0, 4.0)])
def test_factors_are_powers_of_what_a_channel_frees_with_mean_one(exponent, ratio):
    weights = weights_of(exponent, Prices(a=4.0, b=1.0))
    made = weights.apply({"a": torch.ones(10), "b": torch.full((10,), -1.0)}, None, masks(a=10, b=10))
    assert made["a"].mean() == pytest.approx(-ratio * made["b"].mean())
    assert sum(weights.factors.values()) / 2 == pytest.approx(1)


def test_no_factor_exceeds_four_and_the_mean_stays_one():
    weights = weights_of(1.0, Prices(a=1000.0, b=2.0, c=1.0, d=1.0, e=1.0))
    weights.refresh(None, masks(a=10, b=10, c=10, d=10, e=10))
    assert weights.factors == pytest.approx({"a": 4.0, "b": 0.4, "c": 0.2, "d": 0.2, "e": 0.2})


def test_a_factor_that_another_ones_cap_raises_is_capped_too():
    names = "abcdefghijkl"
    weights = weights_of(1.0, Prices(**{**dict.fromkeys(names, 1.0), "a": 1000.0, "b": 30.0}))
    weights.refresh(None, masks(**dict.fromkeys(names, 10)))
    assert weights.factors == pytest.approx({**dict.fromkeys(names, 0.4), "a": 4.0, "b": 4.0})


def test_beside_a_costly_site_channels_that_free_nothing_are_not_pushed():
    weights = weights_of(1.0, Prices(**{**dict.fromkeys("bcdefg", 0.0), "a": 5.0}))
    weights.refresh(None, masks(**dict.fromkeys("abcdefg", 10)))
    assert weights.factors == {**dict.fromkeys("bcdefg", 0.0), "a": 4.0}


@pytest.mark.parametrize("kept", [0, 1])
def test_a_site_that_keeps_no_channel_to_remove_is_judged_by_one_that_comes_back(kept):
    weights = weights_of(1.0, Prices(a=3.0, b=1.0))
    weights.measure = lambda network, masks: 3.0 * max(int(masks["a"].sum()), 1) + int(masks["b"].sum())
    weights.refresh(None, masks(a=kept + 1, b=10))
    assert weights.factors["a"] == pytest.approx(3 * weights.factors["b"])


def test_channels_that_free_nothing_weigh_alike():
    weights = weights_of(0.5, Prices(a=0.0, b=0.0))
    weights.refresh(None, masks(a=10, b=10))
    assert weights.factors == {"a": 1.0, "b": 1.0}


def test_factors_are_computed_again_after_a_tenth_of_the_channels_has_changed():
    weights = weights_of(1.0, prices := Prices(a=4.0, b=1.0))
    weights.refresh(None, masks(a=10, b=10))
    asked = prices.asked
    weights.refresh(None, masks(a=9, b=9))
    assert prices.asked == asked
    resumed = weights_of(1.0, prices)
    resumed.load_state_dict(weights.state_dict())
    resumed.refresh(None, masks(a=9, b=9))
    assert prices.asked == asked
    assert resumed.factors == weights.factors
    resumed.refresh(None, masks(a=8, b=9))
    assert prices.asked > asked


@pytest.mark.parametrize("exponent", [-0.1, 1.1, "0.5", None, True])
def test_an_exponent_is_from_zero_to_one(exponent):
    with pytest.raises(ConfigError, match=r"from 0 .* to 1"):
        weights_of(exponent, Prices(a=1.0))
