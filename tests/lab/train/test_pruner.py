"""Which settings a recipe may give a method, and where."""

from typing import Any

import pytest
from torch import Tensor, nn

from softprune.errors import ConfigError
from softprune.lab.config.method import MethodConfig
from softprune.lab.config.recipes import load_recipe, recipe_files
from softprune.lab.train.pruner import RECIPE_KEYS, check_latency_table, check_method, options_of
from softprune.lab.train.run import check
from softprune.methods import REGISTRY, LayerwisePruner
from softprune.methods.options import keywords_of


@pytest.mark.parametrize("method", sorted(REGISTRY))
@pytest.mark.parametrize("option", sorted(RECIPE_KEYS))
def test_what_has_a_key_of_its_own_is_no_option(method: str, option: str) -> None:
    elsewhere = {"masks": "masks.delta", "seed": "seed", "total_steps": "train.epochs"}
    key = elsewhere.get(option, f"method.{option}")
    with pytest.raises(ConfigError, match=rf"Got '{option}', .* use (the table \[masks\], as in )?{key}\.$"):
        check_method(MethodConfig(name=method, options={option: 1}))


@pytest.mark.parametrize(("method", "offered"), [("sfp", "ratio, evaluation"), ("scp", "site_kinds")])
def test_an_unknown_option_is_told_those_that_only_the_method_has(method: str, offered: str) -> None:
    with pytest.raises(ConfigError, match=rf"options of {method}: {offered}\. Got 'ratios'"):
        check_method(MethodConfig(name=method, options={"ratios": 1}))


@pytest.mark.parametrize("recipe", recipe_files())
def test_recipes_give_their_methods_options_that_they_have(recipe: str) -> None:
    config = load_recipe(recipe)
    check_method(config.method, compact_at=config.train.compact_at)


def test_a_pruner_of_ones_own_has_the_keywords_of_its_base() -> None:
    class Typed(LayerwisePruner):
        def __init__(self, model: nn.Module, example: Tensor, decay: float = 0.9, **options: Any) -> None: ...

    class Bare(Typed):
        def __init__(self, model, example, *, momentum=0.1, **options): ...  # type: ignore[no-untyped-def]

    class Closed(Bare):
        def __init__(self, model: nn.Module, example: Tensor, *, share: float) -> None: ...

    base = keywords_of(LayerwisePruner)
    assert {"ratio", "target", "include", "seed"} <= set(base)
    assert keywords_of(Typed) == ("decay", *base)
    assert keywords_of(Bare) == ("momentum", "decay", *base)
    assert options_of(Bare) == ("momentum", "decay", "ratio")
    assert keywords_of(Closed) == ("share",)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("l2", r"method\.name must be one of scp, .*, dense, or module:Class of your own\. Got 'l2'\."),
        ("softprune.methods.layerwise.L1Pruner", r"Did you mean 'softprune\.methods\.layerwise:L1Pruner'\?"),
        ("softprune.methods:keywords_of", "and softprune.methods has no 'keywords_of'"),
        ("softprune.methods:from_scratch", r"must name a subclass of softprune\.methods\.Pruner"),
        ("softprune.methods:LayerwisePruner", "that has a `name`"),
    ],
)
def test_a_name_that_is_no_method(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_method(MethodConfig(name=name))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target": {"macs": 0.5}}, r"needs a target of latency\. Got .*device\.json.* and target = .*macs"),
        ({"target": {"latency": 0.5}, "latency_batch": 8}, "exclude each other: a table is of one batch size"),
    ],
)
def test_a_latency_table_that_would_be_ignored_is_refused_of_new_runs_alone(
    settings: dict[str, Any], message: str
) -> None:
    recorded = MethodConfig(latency_table="device.json", **settings)  # in the record of an older run
    with pytest.raises(ConfigError, match=message):
        check_latency_table(recorded)
    check_latency_table(MethodConfig(latency_table="device.json", target={"latency": 0.5}))
    config = load_recipe("digits").replace(method=recorded)
    with pytest.raises(ConfigError, match=message):
        check(config, device="cpu")
