"""Distillation in runs: what is learned, what is refused before training, and resuming."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import StopAt, assert_same, final_state, metrics, tiny_config

from softprune.errors import ConfigError
from softprune.lab.config.settings import RunConfig
from softprune.lab.runs.checkpoint import read_newest
from softprune.lab.train.run import resume, start

Tiny = Callable[..., RunConfig]


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    monkeypatch.chdir(tmp_path)
    return lambda *overrides: tiny_config(tmp_path, "train.epochs=2", *overrides)


@pytest.mark.slow
def test_a_run_learns_from_its_baseline_and_resumes_exactly(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny("train.dense_baseline=true", "distill.teacher=baseline", "finetune.epochs=1")
    whole = start(config, tmp_path / "whole")
    assert whole.result is not None
    assert start(config, tmp_path / "parts", listener=StopAt(35)).stopped  # in training, after 30 steps of the baseline
    assert resume(tmp_path / "parts", listener=StopAt(30)).stopped  # in fine-tuning
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


@pytest.mark.slow
def test_wrong_teachers_are_refused_and_nothing_is_written(tiny: Tiny, tmp_path: Path) -> None:
    assert start(tiny("method.name=dense"), tmp_path / "half", listener=StopAt(9)).stopped
    start(tiny("train.epochs=1"), tmp_path / "pruned")
    state: dict[str, Any] = read_newest(tmp_path / "half" / "checkpoints")[1]["model"]
    torch.save(
        {name: value[:7] if name[:3] == "11." else value for name, value in state.items()}, tmp_path / "seven.pt"
    )
    for message, *overrides in (
        ("does not exist", "distill.teacher=nowhere.pt"),
        ("needs the dense baseline", "distill.teacher=baseline"),
        ("needs the trained network to start from", "distill.teacher=start"),
        ("exclude each other", "distill.teacher=w.pt", "train.label_smoothing=0.1"),
        ("not finished", "distill.teacher=half"),
        ("a run with method scp", "distill.teacher=pruned"),
        ("for these classes", "distill.teacher=seven.pt"),
    ):
        with pytest.raises(ConfigError, match=message):
            start(tiny(*overrides), tmp_path / "run")
        assert not (tmp_path / "run").exists()
