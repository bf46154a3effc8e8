"""Search: values from ranges, early stopping by Pareto dominance, and a whole search on the digits."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import tiny_recipe
from typer.testing import CliRunner

import softprune.lab.cli.sweep  # noqa: F401  (registers the command)
from softprune.errors import ConfigError
from softprune.lab.cli.app import app
from softprune.lab.sweep.grid import read_sweep
from softprune.lab.sweep.runner import Halving, Job
from softprune.lab.sweep.search import Search, read_search

SPACE = {"method.strength": {"low": 1e-4, "high": 1e-2, "log": True}, "optimizer.lr": {"low": 0.1, "high": 0.5}}


def search(**options: Any) -> Search:
    found = read_search({"trials": 8, "space": SPACE, **options})
    assert found is not None
    return found


def test_values_fill_the_ranges_evenly() -> None:
    points = search(trials=64).points()
    assert points == search(trials=64).points()
    for key, middle in (("method.strength", 1e-3), ("optimizer.lr", 0.3)):
        values = [point[key] for point in points]
        assert len(set(values)) == 64
        assert 28 <= sum(value < middle for value in values) <= 36
    quarters = {(p["method.strength"] < 1e-3, p["optimizer.lr"] < 0.3) for p in points[:8]}
    assert len(quarters) == 4, "also the first few points are spread"
    assert search(seed=1, trials=8).points() == search(trials=16).points()[8:]


@pytest.mark.parametrize("log", [False, True])
def test_the_widest_ranges_give_finite_values(log: bool) -> None:
    widest = {"low": 1e-100 if log else -1e100, "high": 1e100, "log": log}
    assert all(math.isfinite(point["seed"]) for point in search(trials=50, space={"seed": widest}).points())


def test_whole_numbers_and_choices() -> None:
    space = {"train.epochs": {"low": 3, "high": 5}, "optimizer.name": {"choices": ["sgd", "adamw"]}}
    assert {point["seed"] for point in search(space={"seed": {"low": 1, "high": 3, "log": True}}).points()} == {1, 2, 3}
    points = search(trials=40, space=space).points()
    epochs = [point["train.epochs"] for point in points]
    assert {value: 12 <= epochs.count(value) <= 15 for value in epochs} == {3: True, 4: True, 5: True}
    mixed = search(trials=9, space={"optimizer.lr": {"low": 0, "high": 0.5}}).points()
    assert sum(0 < point["optimizer.lr"] < 0.5 for point in mixed) >= 8, "one bound with a point is enough"
    assert {point["optimizer.name"] for point in points} == {"sgd", "adamw"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trials": 0}, r"search\.trials must be a whole number, at least 1 and at most 5000. Got 0"),
        ({"trail": 5}, r"A key of \[search\] must be one of trials, .* Got 'trail'. Did you mean 'trials'"),
        ({"space": {}}, "at least one setting"),
        ({"space": {"seed": {"low": 1, "high": 1}}}, "seed: low must be below high. Got 1 and 1"),
        ({"space": {"seed": [0, 1]}}, r"must be \{ low = .* Got seed = \[0, 1\]"),
        ({"space": {"seed": {"low": 1}}}, "low and high, or choices. Got seed with low"),
        (
            {"space": {"seed": {"low": "a", "high": 1}}},
            "seed: low must be a whole number or a number, at least .* Got 'a'",
        ),
        ({"space": {"seed": {"low": 0, "high": float("inf")}}}, "seed: high must be .* at most 1e[+]100. Got inf"),
        (
            {"space": {"seed": {"low": 0, "hihg": 1}}},
            "A key of the range of seed must be one of .* Did you mean 'high'",
        ),
        ({"space": {"seed": {"choices": []}}}, "seed: choices must be a list of at least one value"),
        ({"space": {"seed": {"choices": [1], "log": True}}}, "without log"),
        ({"space": {"seed": {"low": 0, "high": 1, "log": "yes"}}}, "seed: log must be true or false. Got 'yes'"),
        ({"space": {"seed": {"low": 2, "high": 1}}}, "low must be below high. Got 2 and 1"),
        ({"space": {"seed": {"low": 0, "high": 1, "log": True}}}, "must begin at 1e-100 or above. Got low = 0"),
        (
            {"space": {"seed": {"low": -1e308, "high": 1e308}}},
            "low must be a whole number or a number, at least -1e[+]100 and at most 1e[+]100. Got -1e",
        ),
        (
            {"space": {"seed": {"low": 1e-308, "high": 1.0, "log": True}}},
            "must begin at 1e-100 or above. Got low = 1e-308",
        ),
        ({"space": {"seed": {"low": 0, "high": 1, "choices": [1]}}}, "Got seed with choices, high, low"),
        ({"factor": 1}, r"search\.factor must be 2 or more"),
    ],
)
def test_mistakes_in_the_section(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        search(**options)


def test_rungs_lie_before_the_last_epoch() -> None:
    assert search(first_epoch=2).rungs(20) == [2, 6, 18]
    assert search().rungs(9) == [1, 3]
    assert search(factor=2).rungs(8) == [1, 2, 4]
    assert search().rungs(1) == search().rungs(0) == search(factor=0).rungs(100) == []


class Trial:
    """A job whose metrics are given."""

    def __init__(self, folder: Path, name: str, top1: float, macs: int, epoch: int = 0) -> None:
        self.state, self.why = "running", None
        path = folder / f"{name}.jsonl"
        config = SimpleNamespace(train=SimpleNamespace(epochs=9))
        self.cell = SimpleNamespace(name=name, run="r", folder=SimpleNamespace(metrics=path), config=config)
        self.add_epoch(top1, macs, epoch)

    def add_epoch(self, top1: float, macs: int, epoch: int) -> None:
        row = {"epoch": epoch, "step": 1, "lr": 0.1, "train_loss": 1.0, "train_top1": 1.0, "seconds": 1.0}
        row |= {"images_per_second": 1.0, "channels": 1, "params": 1, "macs": macs, "test_top1": top1}
        with self.cell.folder.metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def drop(self, why: dict[str, Any]) -> None:
        self.why = why


def dropped(folder: Path, *figures: tuple[float, int]) -> list[bool]:
    """Whether each trial is dropped, when they reach the first epoch in this order."""
    halving = Halving(search(factor=3))
    trials: list[Any] = []
    for number, (top1, macs) in enumerate(figures):
        trials.append(Trial(folder, str(number), top1, macs))
        halving.drop_losers(trials)
        halving.drop_losers(trials)  # looking twice counts once
    return [trial.why is not None for trial in trials]


def test_the_best_third_continues(tmp_path: Path) -> None:
    assert dropped(tmp_path, (90, 5), (70, 5), (80, 5), (95, 5), (91, 5), (60, 5)) == [
        False,  # the first
        True,  # second of two
        True,  # second of three
        False,
        False,  # second of five: among the best third
        True,
    ]


def test_trials_of_another_sweep_on_the_same_folder_count(tmp_path: Path) -> None:
    other, own = Trial(tmp_path, "other", 90, 5), Trial(tmp_path, "own", 80, 5)
    other.state = "waiting"
    halving = Halving(search(factor=3))
    for state in ("waiting", "running"):
        own.state = state
        halving.drop_losers([other, own])  # type: ignore[list-item]
    assert other.why is None
    assert own.why == {"epoch": 1, "top1": 80, "macs": 5, "trials": 2}


def test_a_trial_is_judged_once_at_each_rung(tmp_path: Path) -> None:
    halving, early, starting = Halving(search(factor=3)), Trial(tmp_path, "early", 60, 5), Trial(tmp_path, "new", 0, 5)
    starting.cell.folder.metrics.unlink()
    halving.drop_losers([starting, early])  # type: ignore[list-item]
    better = [Trial(tmp_path, str(top1), top1, 5) for top1 in (70, 80, 90)]
    early.add_epoch(60, 5, 1)
    halving.drop_losers([early, *better])  # type: ignore[list-item]
    assert early.why is None, "it was the best after its first epoch, and the second one is no rung"
    for trial in (*better, early):
        trial.add_epoch(60 - 59 * (trial is early), 5, 2)
    halving.drop_losers([*better, early])  # type: ignore[list-item]
    assert early.why == {"epoch": 3, "top1": 1, "macs": 5, "trials": 4}


def test_fewer_macs_outweigh_accuracy(tmp_path: Path) -> None:
    assert dropped(tmp_path, (90, 5), (80, 4), (70, 3), (69, 3), (70, 2)) == [False, False, False, True, False]


def test_a_sweep_has_the_trials_of_its_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_recipe(tmp_path)
    text = "[grid]\nseed = [0, 1]\n[[run]]\nrecipe = 'tiny.toml'\n[search]\ntrials = 3\n"
    space = "[search.space]\n'method.strength' = {low = 0.001, high = 0.1, log = true}\n"
    (tmp_path / "s.toml").write_text(text + space)
    sweep = read_sweep("s.toml")
    assert len(sweep.cells) == 6
    assert len({cell.config.method.strength for cell in sweep.cells}) == 3
    assert all(cell.run == "tiny" and 0.001 <= cell.config.method.strength < 0.1 for cell in sweep.cells)
    (tmp_path / "s.toml").write_text(text + space.replace("strength'", "strenth'"))
    with pytest.raises(ConfigError, match=r"method\.strength"):
        read_sweep("s.toml")
    for changed, message in (
        (text.replace("seed = [0, 1]", "'method.strength' = [1]") + space, "in one place. Got method.strength"),
        (text.replace("trials = 3", "trials = 3\nfirst_epoch = 4") + space, "first_epoch must be below .* Got 4 and 4"),
        (text.replace("[grid]\nseed = [0, 1]", "") + "space.seed = {choices = [1]}", "lower search.trials"),
    ):
        (tmp_path / "s.toml").write_text(changed)
        with pytest.raises(ConfigError, match=message):
            read_sweep("s.toml")


def test_a_section_must_have_trials_and_space() -> None:
    for values, missing in (({"trials": 3}, "no space"), ({"space": SPACE}, "no trials"), (3, "search = 3")):
        with pytest.raises(ConfigError, match=missing):
            read_search(values)


def test_a_dropped_trial_stays_dropped(tmp_path: Path) -> None:
    folder = SimpleNamespace(result=tmp_path / "result.json")
    job = Job(SimpleNamespace(folder=folder), tmp_path / "a.log")  # type: ignore[arg-type]
    assert job.idle_state() == "waiting"
    codes, asked = iter([None, 75]), list[str]()
    job.task = SimpleNamespace(terminate=lambda: asked.append("to end"), poll=lambda: next(codes))  # type: ignore[assignment]
    job.drop({"epoch": 1, "trials": 6})
    assert asked == ["to end"]
    assert not job.poll()
    assert job.poll()
    assert (job.state, job.idle_state()) == ("dropped", "dropped")
    assert job.last_lines() == ["not among the best of 6 trials after epoch 1"]
    job.dropped_file.write_text("by hand")
    assert job.last_lines() == []
    folder.result.touch()  # it ended before the signal came
    assert job.idle_state() == "done"


@pytest.mark.slow
def test_a_search_ends_with_its_pareto_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole command: trials are dropped, the front is written, and a second call does nothing."""
    tiny_recipe(tmp_path)
    (tmp_path / "s.toml").write_text(
        "[[run]]\nrecipe = 'tiny.toml'\nset = {'train.epochs' = 10, 'method.strength' = 0.001}\n"
        "[search]\ntrials = 2\nfactor = 2\n[search.space]\n"
        "'optimizer.lr' = {choices = [0.1, 1e-5]}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3] / "src"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("softprune.lab.sweep.runner._POLL_SECONDS", 0.05)  # epochs are short
    first, again = (CliRunner().invoke(app, ["sweep", "s.toml", "--device", "cpu"]) for _ in range(2))
    assert first.exit_code == 0, first.output
    assert "Dropped early: 1 of 2 trials." in first.stdout
    assert "Pareto front: runs/s/pareto.html" in first.stdout
    why = json.loads((tmp_path / "runs/s/logs/tiny-lr1e-05.dropped").read_text())
    assert why["epoch"] in (1, 2, 4, 8)  # a rung; which one depends on how far it gets between two looks
    assert again.exit_code == 0
    assert again.stdout.splitlines()[-3:] == first.stdout.splitlines()[-3:]
