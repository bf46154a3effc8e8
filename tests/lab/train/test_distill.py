"""Distillation in runs: what is learned, what is refused before training, and resuming."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import StopAt, assert_same, final_state, metrics

from softprune.lab.config.settings import RunConfig
from softprune.lab.runs.checkpoint import read_newest
from softprune.lab.train.run import resume, start

Tiny = Callable[..., RunConfig]


@pytest.mark.slow
def test_a_run_learns_from_its_baseline_and_resumes_exactly(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny("train.epochs=2", "train.dense_baseline=true", "distill.teacher=baseline", "finetune.epochs=1")
    whole = start(config, tmp_path / "whole")
    assert whole.result is not None
    assert start(config, tmp_path / "parts", listener=StopAt(35)).stopped  # in training, after 30 steps of the baseline
    assert resume(tmp_path / "parts", listener=StopAt(30)).stopped  # in fine-tuning
    resume(tmp_path / "parts")
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "parts")
    assert_same(final_state(tmp_path / "whole"), final_state(tmp_path / "parts"))
    start(tiny("train.epochs=2", "finetune.epochs=1"), tmp_path / "plain")
    assert metrics(tmp_path / "plain") != metrics(tmp_path / "whole")


def test_a_run_and_a_file_are_the_same_teacher(tiny: Tiny, tmp_path: Path) -> None:
    start(tiny("train.epochs=2", "method.name=dense", "seed=1"), tmp_path / "dense")
    torch.save(read_newest(tmp_path / "dense" / "checkpoints")[1]["model"], tmp_path / "w.pt")
    for teacher in ("dense", "w.pt"):
        start(tiny("train.epochs=1", f"distill.teacher={teacher}"), tmp_path / f"by-{teacher}")
    assert metrics(tmp_path / "by-dense") == metrics(tmp_path / "by-w.pt")
