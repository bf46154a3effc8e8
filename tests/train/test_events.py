"""TensorBoard's events, read back as TensorBoard reads them."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from softprune.config.settings import RunConfig
from softprune.errors import ConfigError
from softprune.train.control import Listener
from softprune.train.metrics import EventWriter
from softprune.train.run import resume, start

Scalars = dict[str, list[tuple[int, float]]]


def written(run: Path) -> Scalars:
    """Every tag's steps and values."""
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def expected(run: Path) -> Scalars:
    """The numbers of metrics.jsonl, as the float32 that an event holds."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found: Scalars = {}
    for row in rows:
        for key, value in row.items():
            if key not in ("epoch", "step") and isinstance(value, int | float):
                found.setdefault(key, []).append((row["step"], float(np.float32(value))))
    return found


def test_events_are_the_lines_of_the_metrics(tiny: Callable[..., RunConfig], tmp_path: Path) -> None:
    run = tmp_path / "run"
    start(tiny("records.tensorboard=true", "records.eval_epochs=2", "finetune.epochs=1"), run)
    scalars = written(run)
    assert scalars == expected(run)
    assert [step for step, _ in scalars["train_loss"]] == [30, 60, 90, 120, 150]
    assert [step for step, _ in scalars["test_top1"]] == [60, 120, 150]  # only where it was tested
    assert [step for step, _ in scalars["strength"]] == [30, 60, 90, 120]  # fine-tuning has none
    assert {"test_loss", "test_top5", "train_top1", "lr", "channels", "params", "macs"} < set(scalars)


def test_a_run_without_the_setting_has_no_events(tiny: Callable[..., RunConfig], tmp_path: Path) -> None:
    start(tiny("train.epochs=1"), tmp_path / "run")
    assert not (tmp_path / "run" / "tensorboard").exists()


@pytest.mark.parametrize(("every", "kept"), [(2, [60]), (0, [])], ids=["checkpoint", "beginning"])
def test_epochs_that_are_trained_again_are_not_there_twice(
    tiny: Callable[..., RunConfig], tmp_path: Path, every: int, kept: list[int]
) -> None:
    class Crash(Listener):
        """Dies in the fourth epoch, when the third one's events are written and its checkpoint is not."""

        def on_epoch_start(self, epoch: int, epochs: int, steps: int) -> None:
            if epoch == 3:
                raise KeyboardInterrupt

    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        start(tiny("records.tensorboard=true", f"records.checkpoint_epochs={every}"), run, listener=Crash())
    assert [step for step, _ in written(run)["lr"]] == [30, 60, 90]
    checkpoints = sorted(path.name for path in run.glob("checkpoints/*"))
    assert checkpoints == [f"step-{step:010d}.ckpt" for step in kept]
    resume(run)
    scalars = written(run)
    assert scalars == expected(run)  # also in seconds, which the first process had others of
    assert [step for step, _ in scalars["lr"]] == [30, 60, 90, 120]


def test_tensorboard_missing_says_how_to_get_it_and_leaves_no_folder(
    tiny: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        EventWriter(tmp_path)
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        start(tiny("records.tensorboard=true"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
