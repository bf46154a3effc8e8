"""Distillation in runs: what is learned, what is refused before training, and resuming."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import assert_same, final_state, metrics, tiny_config

from softprune.errors import ConfigError
from softprune.lab.config.settings import RunConfig
from softprune.lab.runs.checkpoint import read_newest
from softprune.lab.train.control import Listener
from softprune.lab.train.run import resume, start

Tiny = Callable[..., RunConfig]


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    monkeypatch.chdir(tmp_path)
    return lambda *overrides: tiny_config(tmp_path, "train.epochs=2", *overrides)


class StopAt(Listener):
    """Stops the run after so many steps."""

    def __init__(self, patch: pytest.MonkeyPatch, steps: int) -> None:
        self.left = steps
        patch.setattr("softprune.lab.train.control.StopSignal.reason", lambda _: "a test" if self.left <= 0 else None)

    def on_step(self, done: int) -> None:
        self.left -= 1


@pytest.mark.slow
def test_a_run_learns_from_its_baseline_and_resumes_exactly(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny("train.dense_baseline=true", "distill.teacher=baseline", "finetune.epochs=1")
    whole = start(config, tmp_path / "whole")
    assert whole.result is not None
    with monkeypatch.context() as patch:  # in training, after 30 steps of the baseline
        assert start(config, tmp_path / "parts", listener=StopAt(patch, 35)).stopped
    with monkeypatch.context() as patch:  # in fine-tuning
        assert resume(tmp_path / "parts", listener=StopAt(patch, 30)).stopped
    resume(tmp_path / "parts")
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "parts")
    assert_same(final_state(tmp_path / "whole"), final_state(tmp_path / "parts"))
    start(tiny("finetune.epochs=1"), tmp_path / "plain")
    assert metrics(tmp_path / "plain") != metrics(tmp_path / "whole")


def test_a_run_and_a_file_are_the_same_teacher(tiny: Tiny, tmp_path: Path) -> None:
    start(tiny("method.name=dense", "seed=1"), tmp_path / "dense")
    torch.save(read_newest(tmp_path / "dense" / "checkpoints")[1]["model"], tmp_path / "w.pt")
    short = ("train.epochs=1",)
    for teacher in ("dense", "w.pt"):
        start(tiny(f"distill.teacher={teacher}", *short), tmp_path / f"by-{teacher}")
    assert metrics(tmp_path / "by-dense") == metrics(tmp_path / "by-w.pt")


def test_a_network_can_learn_from_the_one_it_starts_from(tiny: Tiny, tmp_path: Path) -> None:
    start(tiny("method.name=dense", "train.epochs=1"), tmp_path / "dense")
    for name, teacher in (("start", "start"), ("named", "dense"), ("alone", "")):
        start(tiny("train.epochs=1", "model.weights=dense", f"distill.teacher={teacher}"), tmp_path / name)
    assert metrics(tmp_path / "start") == metrics(tmp_path / "named") != metrics(tmp_path / "alone")


def test_a_teacher_may_be_moved(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(tiny("method.name=dense", "train.epochs=1"), tmp_path / "dense")
    torch.save(read_newest(tmp_path / "dense" / "checkpoints")[1]["model"], tmp_path / "w.pt")
    with monkeypatch.context() as patch:
        start(tiny("distill.teacher=w.pt"), tmp_path / "run", listener=StopAt(patch, 9))
    (tmp_path / "w.pt").rename(tmp_path / "moved.pt")
    with pytest.raises(ConfigError, match=r"does not exist\. If the teacher .* change the path in its config\.toml"):
        resume(tmp_path / "run")
    path = tmp_path / "run" / "config.toml"
    path.write_text(path.read_text().replace("w.pt", "moved.pt"))
    assert resume(tmp_path / "run").result is not None


@pytest.mark.slow
def test_wrong_teachers_are_refused_and_nothing_is_written(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(message: str, *overrides: str) -> None:
        with pytest.raises(ConfigError, match=message):
            start(tiny(*overrides), tmp_path / "run")
        assert not (tmp_path / "run").exists()

    refused("does not exist", "distill.teacher=nowhere.pt")
    refused(r"distill\.teacher must be .* Got .*, which is neither", "distill.teacher=.")
    refused("needs the dense baseline", "distill.teacher=baseline")
    refused(r"needs the trained network to start from. Got model\.weights", "distill.teacher=start")
    refused(r"model\.weights = .baseline. needs the dense baseline", "model.weights=baseline")
    refused("exclude each other", "distill.teacher=w.pt", "train.label_smoothing=0.1")
    with monkeypatch.context() as patch:
        start(tiny("method.name=dense"), tmp_path / "half", listener=StopAt(patch, 9))
    refused("not finished", "distill.teacher=half")
    start(tiny("train.epochs=1"), tmp_path / "pruned")
    refused("pruned: a run with method scp", "distill.teacher=pruned")
    state: dict[str, Any] = read_newest(tmp_path / "half" / "checkpoints")[1]["model"]
    seven = {name: value[:7] if name.startswith("11.") else value for name, value in state.items()}
    torch.save(seven, tmp_path / "seven.pt")
    refused("for these classes", "distill.teacher=seven.pt")
