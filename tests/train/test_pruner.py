"""Which settings a recipe may give a method, and where."""

import pytest

from softprune.config.method import MethodConfig
from softprune.config.recipes import load_recipe, recipe_files
from softprune.errors import ConfigError
from softprune.methods import REGISTRY
from softprune.methods.registry import _RECIPE_KEYS
from softprune.train.pruner import check_method


@pytest.mark.parametrize("method", sorted(REGISTRY))
@pytest.mark.parametrize("option", sorted(_RECIPE_KEYS))
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
