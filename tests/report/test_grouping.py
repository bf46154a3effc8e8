"""Which runs are repetitions of one experiment, what it is called, and its mean and spread."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from softprune.report import load_run
from softprune.report.comparison.pareto import Spot, front
from softprune.report.grouping import group_runs, over, spread, with_baselines

Make = Callable[..., tuple[Path, dict[str, Any]]]


def test_runs_that_differ_in_the_seed_alone_are_one_group(make_run: Make) -> None:
    runs = [
        load_run(make_run(f"{level}-{seed}", seed=seed, level=level)[0])
        for level in (0.6, 1.0)
        for seed in (0, 1)
    ]
    groups = group_runs(runs)
    assert [[run.seed for run in group.runs] for group in groups] == [[0, 1], [0, 1]]
    assert [group.label for group in groups] == ["strength 6e-5", "strength 1e-4"]


def test_a_group_is_called_by_the_name_its_runs_share(make_run: Make) -> None:
    scp = [load_run(make_run(f"a{seed}", seed=seed)[0]) for seed in (0, 1, 2)]
    slimming = load_run(make_run("b", method="slimming")[0])
    assert [group.label for group in group_runs([*scp, slimming])] == [
        "digits_net-scp",
        "digits_net-slimming-seed0",
    ]


def test_the_same_run_twice_is_told_apart(make_run: Make) -> None:
    one, other = load_run(make_run("a")[0]), load_run(make_run("b", "vgg16")[0])
    labels = [group.label for group in group_runs([one, other, one])]
    assert len(labels) == len(set(labels)) == 2


def test_spread_is_the_sample_deviation_over_known_values(make_run: Make) -> None:
    found = spread([1.0, 2.0, None, 4.0])
    assert found.mean == pytest.approx(7 / 3)
    assert found.deviation == pytest.approx(1.5275252)
    assert found.n == 3
    assert spread([3.0]).deviation is None
    assert spread([None]).mean is None
    group = group_runs([load_run(make_run()[0])])[0]
    assert over(group, lambda run: run.wall_seconds).mean == 411.3


def test_the_front_is_what_nothing_beats() -> None:
    spots = [Spot(3, 90), Spot(1, 80), Spot(2, 85), Spot(2, 84), Spot(4, 89), Spot(1, 70)]
    assert front(spots) == [Spot(1, 80), Spot(2, 85), Spot(3, 90)]


def test_dense_runs_stand_in_as_the_baseline_of_runs_without_one(make_run: Make) -> None:
    folder, record = make_run("scp")
    record["table"] = record["table"][1:]
    (folder / "result.json").write_text(json.dumps(record))
    dense = load_run(make_run("dense", method="dense", level=0)[0])
    elsewhere = load_run(make_run("vgg", "vgg16", method="dense", level=0)[0])
    alone, beside = with_baselines([load_run(folder)]), with_baselines([load_run(folder), dense, elsewhere])
    assert alone[0].dense_top1 is None
    assert beside[0].dense_top1 == dense.shipped_top1


def test_runs_of_one_name_are_told_apart_by_what_had_an_effect(make_run: Make) -> None:
    fixed, other = load_run(make_run("fixed")[0]), load_run(make_run("vgg", "vgg16")[0])
    folder, record = make_run("budget")
    record["config"]["method"]["target"] = {"macs": 0.5}
    (folder / "result.json").write_text(json.dumps(record))
    labels = [group.label for group in group_runs([fixed, load_run(folder), other])]
    assert labels == [
        f"{fixed.name} · strength 1e-4",
        f"{fixed.name} · macs 0.5",
        other.name,
    ]


def test_a_dense_network_has_no_settings_of_a_method(make_run: Make) -> None:
    dense = [load_run(make_run(f"d{level}", method="dense", level=level)[0]) for level in (0.5, 1.0)]
    assert len(group_runs(dense)) == 1


@pytest.mark.parametrize("name", ["sss", "vgg16", "cifar10-resnet56", "digits-scp"])
def test_a_name_keeps_its_own_last_letter(name: str, make_run: Make) -> None:
    runs = []
    for seed in (0, 1):
        folder, record = make_run(f"{name}{seed}", seed=seed)
        for ending in (f"-seed{seed}", f"-s{seed}", f"_{seed}", ""):
            record["name"] = name + ending
            (folder / "result.json").write_text(json.dumps(record))
            runs.append(load_run(folder))
    for ending in range(4):
        (group,) = group_runs([runs[ending], runs[4 + ending]])
        assert group.label == name
