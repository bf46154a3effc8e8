"""Every kind of method through the whole trainer: decided, cut, fine-tuned, and the same after a stop."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import final_state, metrics

from softprune.errors import CheckpointError, ConfigError
from softprune.lab.config.settings import RunConfig
from softprune.lab.train.run import resume, start

Tiny = Callable[..., RunConfig]

RUNS = {
    "slimming": ("method.options.ratio=0.5", "finetune.epochs=1"),
    "sss": ("method.strength=0.3",),
    "scp-target": ("method.strength=0.05",),
}


@pytest.mark.parametrize("method", RUNS)
def test_a_stopped_run_ends_as_one_that_was_left_alone(method: str, tiny: Tiny, tmp_path: Path) -> None:
    config = tiny(f"method.name={method}", "train.epochs=2", *RUNS[method])
    whole = start(config, tmp_path / "whole")
    assert start(config, tmp_path / "stopped", time_limit=0).stopped
    assert resume(tmp_path / "stopped", time_limit=0).result is None  # after one more step
    again = resume(tmp_path / "stopped")
    assert metrics(tmp_path / "stopped") == metrics(tmp_path / "whole")
    first, second = final_state(tmp_path / "whole"), final_state(tmp_path / "stopped")
    assert {name: value.tolist() for name, value in first["model"].items()} == {
        name: value.tolist() for name, value in second["model"].items()
    }
    assert again.result.compact == whole.result.compact


def test_a_method_that_decides_once_is_whole_until_then(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny("method.name=slimming", "method.options.ratio=0.5", "finetune.epochs=2")
    result = start(config, tmp_path / "run").result
    rows = result.epochs
    assert [row.decided for row in rows] == [False] * 3 + [True] * 3
    assert [row.macs == result.dense.macs for row in rows] == [True] * 3 + [False] * 3
    masked = next(row for row in result.table if row.name == "masked")
    assert masked.top1 == rows[3].test_top1
    assert result.best.epoch >= 4
    assert result.last.top1 == rows[-1].test_top1
    assert result.compact.channels == 18


def test_same_shape_from_scratch_with_a_cut_on_the_way(tiny: Tiny, tmp_path: Path) -> None:
    shape = start(tiny("method.name=random", "train.epochs=1"), tmp_path / "random").result
    options = ("method.name=scratch", f"method.options.plan={tmp_path / 'random'}", "train.compact_at=1")
    result = start(tiny(*options), tmp_path / "run").result
    assert result.compact == shape.compact
    assert [row.macs for row in result.epochs] == [shape.compact.macs] * 4


def test_the_plan_of_a_stopped_run_may_be_moved_but_not_changed(tiny: Tiny, tmp_path: Path) -> None:
    for name, seed in (("plan", 0), ("other", 1)):
        start(tiny("method.name=random", "train.epochs=1", f"seed={seed}"), tmp_path / name)
    config = tiny("method.name=scratch", f"method.options.plan={tmp_path / 'plan'}", "train.epochs=1")
    assert start(config, tmp_path / "run", time_limit=0).stopped
    (tmp_path / "plan").rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match="`plan` must be"):
        resume(tmp_path / "run")
    path = tmp_path / "run" / "config.toml"
    text = path.read_text()
    path.write_text(text.replace(str(tmp_path / "plan"), str(tmp_path / "other")))
    with pytest.raises(CheckpointError, match="a state must have the method"):
        resume(tmp_path / "run")
    path.write_text(text.replace(str(tmp_path / "plan"), str(tmp_path / "moved")))
    assert resume(tmp_path / "run").result is not None
