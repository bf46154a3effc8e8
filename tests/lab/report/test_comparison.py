"""Which runs are repetitions of one experiment, what it is called, and its mean and spread."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from softprune.lab.report.comparison import cells_of, compare_runs, distinct, front, spread, with_baselines
from softprune.lab.runs.folder import load_run
from softprune.lab.runs.result import Run

Make = Callable[..., tuple[Path, dict[str, Any]]]


def labels(runs: list[Run]) -> list[str]:
    return [row.label for row in compare_runs(runs)[0]]


def test_runs_that_differ_in_the_seed_alone_are_one_row(make_run: Make) -> None:
    runs = [load_run(make_run(f"{level}-{seed}", seed=seed, level=level)[0]) for level in (0.6, 1.0) for seed in (0, 1)]
    rows, _ = compare_runs(runs)
    assert [[run.seed for run in row.runs] for row in rows] == [[0, 1], [0, 1]]
    assert [row.label for row in rows] == [f"digits_net-scp · strength {value}" for value in ("6e-05", "0.0001")]
    scp = [load_run(make_run(f"a{seed}", seed=seed)[0]) for seed in (0, 1, 2)]
    slimming = load_run(make_run("b", method="slimming")[0])
    assert labels([*scp, slimming]) == ["digits_net-scp", "digits_net-slimming-seed0"]


def test_spread_is_the_sample_deviation_over_known_values() -> None:
    found = spread([1.0, 2.0, None, 4.0])
    assert found.mean == pytest.approx(7 / 3)
    assert found.deviation == pytest.approx(1.5275252)
    assert found.n == 3
    assert spread([3.0]).deviation is None
    assert spread([None]).mean is None


def test_the_front_is_what_nothing_beats() -> None:
    assert front([(3, 90), (1, 80), (2, 85), (2, 84), (4, 89), (1, 70)]) == [(1, 80), (2, 85), (3, 90)]


def test_dense_runs_stand_in_as_the_baseline_of_runs_without_one(make_run: Make) -> None:
    folder, record = make_run("scp")
    record["table"] = record["table"][1:]
    (folder / "result.json").write_text(json.dumps(record))
    dense = load_run(make_run("dense", method="dense", level=0)[0])
    elsewhere = load_run(make_run("vgg", "vgg16", method="dense", level=0)[0])
    alone, beside = with_baselines([load_run(folder)]), with_baselines([load_run(folder), dense, elsewhere])
    assert alone[0].dense_top1 is None
    assert beside[0].dense_top1 == dense.compact_top1


def changed(made: tuple[Path, dict[str, Any]], own_dense: float | None = None, **settings: Any) -> Run:
    """A run that trained no dense network, or one of this accuracy; with other settings, by dotted name."""
    folder, record = made
    for key, value in settings.items():
        table, _, name = key.partition("__")
        record["config"][table][name] = value
    record["table"][0]["top1"] = own_dense
    (folder / "result.json").write_text(json.dumps(record))
    return load_run(folder)


@pytest.mark.parametrize(
    ("setting", "value", "is_baseline"),
    [
        ("train__epochs", 3, False),
        ("optimizer__lr", 0.01, False),
        ("schedule__milestones", [5], False),
        ("data__batch_size", 32, False),
        ("train__mode", "eager", True),
        ("train__compact_at", 5, True),
        ("data__dir", "/elsewhere", True),
        ("records__checkpoint_epochs", 7, True),
        ("schedule__final", 0.1, True),  # not used by steps
        ("train__ema", 0.0, True),  # not recorded of the dense run
    ],
)
def test_a_baseline_was_trained_in_the_same_way(make_run: Make, setting: str, value: Any, is_baseline: bool) -> None:
    folder, record = make_run("dense", method="dense", level=0)
    record["config"] |= {"records": {"checkpoint_epochs": 1}}
    record["config"]["schedule"]["final"] = 0.0
    record["config"]["train"]["compact_at"] = 0
    (folder / "result.json").write_text(json.dumps(record))
    dense = load_run(folder)
    pruned = make_run("scp")
    pruned[1]["config"]["records"] = {}
    run = with_baselines([changed(pruned, **{setting: value}), dense])[0]
    assert run.dense_top1 == (dense.compact_top1 if is_baseline else None)


def test_baselines_of_a_runs_own_are_not_averaged_with_others(make_run: Make) -> None:
    dense = load_run(make_run("dense", method="dense", level=0)[0])
    own, other = changed(make_run("own"), own_dense=97.0), changed(make_run("other", seed=1))
    found = with_baselines([own, other, dense])
    assert [run.dense_top1 for run in found] == [97.0, None, dense.dense_top1]


def test_a_run_done_twice_counts_once(make_run: Make) -> None:
    folders = [make_run(name, seed=seed) for name, seed in (("old", 0), ("new", 0), ("seed", 1))]
    folders[1][1]["finished"] = "2025-02-01T00:00:00Z"
    (folders[1][0] / "result.json").write_text(json.dumps(folders[1][1]))
    old, new, seed = (load_run(folder) for folder, _ in folders)
    kept, (repeat,) = distinct([old, new, seed])
    assert kept == [new, seed]
    assert repeat == f"{old.path} has the configuration and seed of {new.path}, which is newer."
    (row,), _ = compare_runs([old, new, seed])
    assert len(row.runs) == 2


def test_runs_of_one_name_are_told_apart_by_what_had_an_effect(make_run: Make) -> None:
    fixed, other = load_run(make_run("fixed")[0]), load_run(make_run("vgg", "vgg16")[0])
    folder, record = make_run("budget")
    record["config"]["method"]["target"] = {"macs": 0.5}
    (folder / "result.json").write_text(json.dumps(record))
    assert labels([fixed, load_run(folder), other]) == [
        *(f"{fixed.name} · {text}" for text in ("strength 0.0001", "macs 0.5")),
        other.name,
    ]


def test_the_table_has_mean_deviation_and_the_front(make_run: Make) -> None:
    made = [make_run(f"run{seed}", "vgg16", seed=seed) for seed in range(2)]
    made.append(make_run("other", "vgg16", level=0.2))
    made.append(make_run("dense", "vgg16", method="dense", level=0))
    for folder, record in made[:2]:
        record["dense"]["activations"], record["compact"]["activations"] = 1000, 600
        (folder / "result.json").write_text(json.dumps(record))
    rows, _ = compare_runs([load_run(folder) for folder, _ in made])
    heads, cells = cells_of(rows)
    tops = [record["table"][2]["top1"] for _, record in made[:2]]
    assert [cell[heads.index("method")] for cell in cells] == ["dense", "SCP", "SCP"]
    assert rows[1].numbers["compact"].mean == pytest.approx(sum(tops) / 2)
    assert cells[1][heads.index("compact")] == f"{sum(tops) / 2:.2f} ± {abs(tops[0] - tops[1]) / 2**0.5:.2f}"
    assert [cell[heads.index("activations cut")] for cell in cells] == ["-", "40.0", "-"]
    cut = 100 * (1 - made[2][1]["compact"]["macs"] / made[2][1]["dense"]["macs"])
    assert rows[2].numbers["MACs cut"].mean == pytest.approx(cut)
    assert any(row.on_front for row in rows)
