"""Which settings a recipe may give a method, and where."""

from typing import Any

import pytest
from torch import Tensor, nn

from softprune.errors import ConfigError
from softprune.lab.config.settings import MethodConfig, RunConfig
from softprune.lab.train.method import NO_OPTIONS, check_method, options_of
from softprune.methods import REGISTRY, RankingPruner
from softprune.methods.options import keywords_of


@pytest.mark.parametrize("method", REGISTRY)
def test_what_recipes_set_elsewhere_is_no_option(method: str) -> None:
    for option in NO_OPTIONS:
        with pytest.raises(ConfigError, match="must be options of"):
            check_method(RunConfig(method=MethodConfig(name=method, options={option: 1})))


def test_a_pruner_of_ones_own_has_the_keywords_of_its_base() -> None:
    class Typed(RankingPruner):
        def __init__(self, model: nn.Module, example: Tensor, decay: float = 0.9, **options: Any) -> None: ...

    class Closed(Typed):
        def __init__(self, model: nn.Module, example: Tensor, *, share: float) -> None: ...

    base = keywords_of(RankingPruner)
    assert {"ratio", "target", "include", "seed"} <= set(base)
    assert keywords_of(Typed) == ("decay", *base)
    assert options_of(Typed) == ("decay", "ratio")
    assert keywords_of(Closed) == ("share",)


@pytest.mark.parametrize(
    ("method", "word"),
    [
        (MethodConfig(name="sfp", options={"ratios": 1}), "options of sfp: ratio, evaluation"),
        (MethodConfig(name="l2"), "must be one of scp"),
        (MethodConfig(name="softprune.methods:keywords_of"), "no attribute 'keywords_of'"),
        (MethodConfig(name="softprune.methods.options:check_share"), "must name a subclass"),
        (MethodConfig(name="softprune.methods:RankingPruner"), "that has a `name`"),
        (MethodConfig(name="sss", target={"macs": 0.5}), "method that supports targets.*Got sss; set method.strength"),
    ],
)
def test_what_no_method_takes_is_refused(method: MethodConfig, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        check_method(RunConfig(method=method))


def test_a_latency_table_needs_a_target_of_latency() -> None:
    MethodConfig(latency_table="device.json", target={"latency": 0.5})
    with pytest.raises(ConfigError, match="latency_table"):
        MethodConfig(latency_table="device.json", target={"macs": 0.5})
