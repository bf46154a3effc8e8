"""Recipes: all that ship load; what a user may mistype is answered; what is written reads back the same."""

from pathlib import Path

import pytest
import tomli_w
from recipes_page import render_reference

from softprune import models
from softprune.errors import ConfigError
from softprune.lab.config.recipes import (
    RECIPES,
    config_to_dict,
    dump_config,
    find_file,
    load_recipe,
    read_config,
    title_of,
)
from softprune.lab.config.settings import MethodConfig, RunConfig, TrainConfig
from softprune.lab.sweep import read_sweep
from softprune.lab.train.method import check_method

REPOSITORY = Path(__file__).parents[3]
PAPER = sorted((REPOSITORY / "benchmarks" / "paper").glob("*.toml"))


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_resolves_and_round_trips(name: str, tmp_path: Path) -> None:
    config = load_recipe(name)
    assert config.name == name
    assert config.model.name in models.REGISTRY or ":" in config.model.name
    assert title_of(RECIPES[name])
    check_method(config if config.train.epochs else config.replace(model=config.model.replace(weights="w.pt")))
    path = tmp_path / "config.toml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert read_config(path) == config
    assert load_recipe(str(path)) == config
    assert RunConfig(**config_to_dict(config)) == config


@pytest.mark.parametrize("path", PAPER, ids=lambda path: path.stem)
def test_the_papers_runs_resolve(path: Path) -> None:
    cells = read_sweep(path)
    assert len({cell.name for cell in cells}) == len(cells)


def test_the_authors_settings_are_the_papers_recipes() -> None:
    config = load_recipe("cifar10-vgg16-scp")
    assert (config.train.epochs, config.data.batch_size, config.method.strength) == (160, 64, 1e-4)
    assert (config.schedule.kind, config.schedule.milestones) == ("step", (80, 121))
    assert (config.optimizer.lr, config.optimizer.weight_decay, config.data.augment) == (0.1, 2e-4, True)
    assert (config.masks.s, config.masks.gate_statistics) == (2.0, "mean")
    assert load_recipe("cifar10-resnet56-scp").method.exclude == ("stages.*.0.bn1",)
    assert load_recipe("cifar100-densenet40-scp").masks.s == 3.0


def test_overrides_are_applied_in_order_and_typed() -> None:
    settings = ["optimizer.lr=0.5", "optimizer.lr=0.25", "schedule.milestones=[3, 5]", "model.name=vgg16", "name=2024"]
    keep = 'method.options.keep={"stages.*" = [0.1, 0.5]}'
    config = load_recipe("digits", [*settings, "train={dense_baseline=false}", "method.options.gain=3", keep])
    assert (config.optimizer.lr, config.schedule.milestones, config.model.name) == (0.25, (3, 5), "vgg16")
    assert (config.name, config.method.options) == ("2024", {"gain": 3, "keep": {"stages.*": [0.1, 0.5]}})
    assert (config.train.dense_baseline, config.train.epochs) == (False, 14), "other settings of a section stay"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lr", "--set takes KEY=VALUE"),
        ("optimizer.lr=fast", "optimizer.lr must be a valid number"),
        ("schedule.milestones=[5, 3]", "schedule.milestones must be in increasing order"),
        ("train.compact_at=1000", "train.compact_at must be an epoch before"),
    ],
)
def test_wrong_overrides_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe("digits", [override])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[optimizer]\nlearning_rate = 0.1", "optimizer.learning_rate"),
        (b"[optimiser]\nlr = 0.1", "Did you mean 'optimizer'"),
        (b"[nothing]\nxyz = 0.1", "Known here: name, seed, model, data"),
        (b"[optimizer\nlr = 0.1", "line 1"),
        (b"[method]\nstrength = 1e-3\ntarget = { macs = 0.5 }", "exclude each other"),
        (b"seed = " + b"[" * 5000 + b"]" * 5000, "TOML"),
        (b'name = "caf\xe9"', "UTF-8"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"(?s)mine\.toml.*{message}"):
        load_recipe(str(path))


def test_a_run_of_an_older_version_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = config_to_dict(load_recipe("digits"))
    values["train"] |= {"ema": 0.0}
    path = tmp_path / "config.toml"
    path.write_text(tomli_w.dumps(values | {"search": {}}))
    assert read_config(path) == load_recipe("digits")
    assert "train.ema" in caplog.text


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'cifar10-vgg16-scp'"):
        find_file("cifar10-vgg16-spc", RECIPES)
    assert find_file("digits.toml", RECIPES) == find_file("digits", RECIPES) == RECIPES["digits"]


def test_the_reference_page_is_up_to_date_and_its_example_a_recipe(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert page == render_reference(), "run python benchmarks/recipes_page.py"
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert [row for row in rows if row.rstrip(" |").endswith("|")] == [], "every setting is explained"
    path = tmp_path / "flowers.toml"
    path.write_text(page.partition("```toml\n")[2].partition("```")[0])
    assert load_recipe(str(path)).method.target == {"macs": 0.5}


@pytest.mark.parametrize(
    ("recipe", "overrides", "target", "strength"),
    [
        ("best-cifar10-vgg16-macs34", [], {"macs": 0.34}, None),
        ("best-cifar10-vgg16-macs34", ["method.strength=3e-5"], {}, 3e-5),
        ("best-cifar10-vgg16-macs34", ["method.target.params=0.5"], {"params": 0.5}, None),
        ("cifar10-resnet56-scp", ["method.target.macs=0.5"], {"macs": 0.5}, None),
        ("cifar10-resnet56-scp", ["method.target={}"], {}, 5e-5),
        ("digits", ["method.name=l1", "method.options.ratio=0.5"], {}, None),
    ],
)
def test_of_a_strength_and_a_target_the_given_one_replaces_the_recipes(
    recipe: str, overrides: list[str], target: dict[str, float], strength: float | None
) -> None:
    method = load_recipe(recipe, overrides).method
    assert dict(method.target) == target
    assert strength is None or method.strength == strength


def test_a_recipe_can_be_trained_dense_by_one_override() -> None:
    config = load_recipe("digits", ["method.name=dense"])
    assert not config.train.dense_baseline
    assert not config.finetune.epochs
    with pytest.raises(ConfigError, match=r"does not prune.*Got train.dense_baseline = true"):
        load_recipe("digits", ["method.name=dense", "train.dense_baseline=true"])
    with pytest.raises(ConfigError, match="does not prune"):
        RunConfig(method=MethodConfig(name="dense"), train=TrainConfig(dense_baseline=True))
