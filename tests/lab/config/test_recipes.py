"""Recipes: all that ship load; what a user may mistype is answered; what is written reads back the same."""

from pathlib import Path

import pytest
from recipes_page import render_reference

from softprune import models
from softprune.errors import ConfigError
from softprune.lab.config.method import MethodConfig
from softprune.lab.config.recipes import (
    config_to_dict,
    dump_config,
    find_recipe,
    load_recipe,
    read_config,
    recipe_files,
    title_of,
)
from softprune.lab.config.settings import RunConfig, TrainConfig
from softprune.lab.data import DATASETS
from softprune.lab.report import paper_figures
from softprune.lab.sweep import read_sweep

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.parametrize("name", recipe_files())
def test_every_recipe_resolves_and_round_trips(name: str, tmp_path: Path) -> None:
    config = load_recipe(name)
    assert config.name == name
    assert config.model.name in models.REGISTRY
    assert config.data.name in DATASETS
    assert title_of(recipe_files()[name])
    path = tmp_path / "config.toml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert read_config(path) == config
    assert RunConfig(**config_to_dict(config)) == config


def test_there_is_a_recipe_for_every_row_of_the_papers_tables() -> None:
    table_1 = {f"cifar10-{net}" for net in ("resnet56", "densenet40", "vgg19", "vgg16")}
    tables_2_3 = {f"cifar100-{net}" for net in ("resnet164", "densenet40", "vgg19", "vgg16")}
    expected = {f"{row}-{kind}" for row in table_1 | tables_2_3 for kind in ("scp", "dense")}
    expected |= {f"{row}-scp-high" for row in tables_2_3}
    expected |= {"imagenet-resnet50-dense", "imagenet-resnet50-scp", "imagenet-resnet50-scp-ft", "digits"}
    assert expected <= set(recipe_files())
    # Tables 6 and 7 vary one setting of a recipe: they are sweeps.
    for sweep in ("paper-table-6", "paper-table-7"):
        expected |= {cell.config.name for cell in read_sweep(sweep).cells}
    assert set(paper_figures()) <= set(recipe_files()) | expected


def test_the_authors_settings_are_the_papers_recipes() -> None:
    config = load_recipe("cifar10-vgg16-scp")
    assert (config.train.epochs, config.data.batch_size, config.method.strength) == (160, 64, 1e-4)
    assert (config.schedule.kind, config.schedule.milestones) == ("step", (80, 121))
    assert (config.optimizer.lr, config.optimizer.weight_decay, config.optimizer.nesterov) == (0.1, 2e-4, True)
    assert (config.masks.s, config.masks.gate_statistics) == (2.0, "mean")
    assert load_recipe("cifar10-resnet56-scp").method.exclude == ("stages.*.0.bn1",)
    assert load_recipe("cifar100-densenet40-scp").masks.s == 3.0


def test_overrides_are_applied_in_order_and_typed() -> None:
    config = load_recipe(
        "digits",
        [
            "optimizer.lr=0.5",
            "optimizer.lr=0.25",
            "schedule.milestones=[3, 5]",
            "model.name=vgg16",
            "name=2024",
            "train.dense_baseline=false",
            "masks.delta=0.1",
            "method.options.gain=3",
            "method.options.grow=0.5",
        ],
    )
    assert (config.optimizer.lr, config.schedule.milestones, config.model.name) == (0.25, (3, 5), "vgg16")
    assert (config.name, config.train.dense_baseline, config.masks.delta) == ("2024", False, 0.1)
    assert config.method.options == {"gain": 3, "grow": 0.5}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lr", "--set takes KEY=VALUE"),
        ("optimizer.lrr=1", "Did you mean 'optimizer.lr'"),
        ("target.macs=0.5", "Did you mean 'method.target.macs'"),
        ("train.lr=1", "Did you mean 'optimizer.lr' or 'finetune.lr'"),
        ("optimizer.lr=fast", "optimizer.lr must be a number"),
        ("optimizer.lr=0", "optimizer.lr must be a number, more than 0"),
        ("schedule.kind=cosin", "Did you mean 'cosine'"),
        ("schedule.milestones=[5, 3]", "schedule.milestones must be in increasing order"),
        ("masks.delta=3", r"masks\.delta must be a number, more than 0"),
        ("masks.gate_statistics=men", "Did you mean 'mean'"),
        ("train.compact_at=1000", "train.compact_at must be an epoch before"),
        ("optimizer.momentum=0", "optimizer.nesterov needs"),
    ],
)
def test_wrong_overrides_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe("digits", [override])


def test_a_typo_in_a_file_names_the_file_and_the_key(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[optimizer]\nlearning_rate = 0.1\n")
    with pytest.raises(ConfigError, match=r"mine\.toml: .*'optimizer\.learning_rate'"):
        load_recipe(str(path))
    for typo, meant in (("optimiser", "optimizer"), ("schedul", "schedule"), ("mask", "masks"), ("sed", "seed")):
        path.write_text(f"[{typo}]\nlr = 0.1\n")
        with pytest.raises(ConfigError, match=f"Got '{typo}'. Did you mean '{meant}'"):
            load_recipe(str(path))
    path.write_text("[nothing]\nlr = 0.1\n")
    with pytest.raises(ConfigError, match="Known here: name, seed, model, data"):
        load_recipe(str(path))
    path.write_text("[optimizer\nlr = 0.1\n")
    with pytest.raises(ConfigError, match="line 1"):
        load_recipe(str(path))


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'cifar10-vgg16-scp'"):
        find_recipe("cifar10-vgg16-spc")
    assert find_recipe("digits.toml") == find_recipe("digits")


def test_contradictions_between_sections_are_refused() -> None:
    with pytest.raises(ConfigError, match="prunes nothing"):
        RunConfig(method=MethodConfig(name="dense"), train=TrainConfig(dense_baseline=True))


def test_the_reference_page_is_up_to_date() -> None:
    page = (REPOSITORY / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert page == render_reference(), "run python benchmarks/recipes_page.py"


def test_the_example_of_the_reference_is_a_recipe(tmp_path: Path) -> None:
    path = tmp_path / "flowers.toml"
    path.write_text(render_reference().partition("```toml\n")[2].partition("```")[0])
    config = load_recipe(str(path))
    assert config.method.target == {"macs": 0.5}
    assert config.model.pretrained


def test_every_setting_is_explained_on_the_reference_page() -> None:
    rows = [line for line in render_reference().splitlines() if line.startswith("| `")]
    assert len(rows) > 50
    assert [row for row in rows if row.rstrip(" |").endswith("|")] == []


@pytest.mark.parametrize(
    ("recipe", "overrides", "target", "strength"),
    [
        ("best-cifar10-vgg16-macs34", [], {"macs": 0.34}, None),
        ("best-cifar10-vgg16-macs34", ["method.strength=3e-5"], {}, 3e-5),
        ("best-cifar10-vgg16-macs34", ["method.target={}", "method.strength=3e-5"], {}, 3e-5),
        ("best-cifar10-vgg16-macs34", ["method.target.params=0.5"], {"params": 0.5}, None),
        ("cifar10-resnet56-scp", ["method.target.macs=0.5"], {"macs": 0.5}, None),
        ("cifar10-resnet56-scp", ["method.target={}"], {}, 5e-5),
    ],
)
def test_of_a_strength_and_a_target_the_given_one_replaces_the_recipes(
    recipe: str, overrides: list[str], target: dict[str, float], strength: float | None
) -> None:
    method = load_recipe(recipe, overrides).method
    assert dict(method.target) == target
    assert strength is None or method.strength == strength


def test_a_strength_and_a_target_at_once_are_refused(tmp_path: Path) -> None:
    both = ["method.target.macs=0.5", "method.strength=1e-3"]
    with pytest.raises(ConfigError, match=r"exclude each other.*0\.001.*'macs': 0\.5"):
        load_recipe("digits", both)
    path = tmp_path / "mine.toml"
    path.write_text("[method]\nstrength = 1e-3\ntarget = { macs = 0.5 }\n")
    with pytest.raises(ConfigError, match="exclude each other"):
        load_recipe(str(path))


def test_the_resolved_configuration_of_a_run_with_a_target_is_a_recipe(tmp_path: Path) -> None:
    config = load_recipe("digits", ["method.target.macs=0.5"])
    path = tmp_path / "config.toml"
    path.write_text(dump_config(config))
    assert load_recipe(str(path)) == config
    assert dict(load_recipe(str(path), ["method.strength=0.5"]).method.target) == {}


def test_a_recipe_can_be_trained_dense_by_one_override() -> None:
    for recipe in ("digits", "cifar10-vgg16-l1-ft"):
        config = load_recipe(recipe, ["method.name=dense"])
        assert not config.train.dense_baseline
        assert not config.finetune.epochs
    with pytest.raises(ConfigError, match=r"prunes nothing.*Got train.dense_baseline = true"):
        load_recipe("digits", ["method.name=dense", "train.dense_baseline=true"])
