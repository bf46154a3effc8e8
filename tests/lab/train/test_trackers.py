"""Experiment trackers: TensorBoard's events read back as TensorBoard reads them; W&B and MLflow as fakes."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from softprune.errors import ConfigError
from softprune.lab.config.settings import RunConfig
from softprune.lab.runs.result import Epoch
from softprune.lab.train.control import Listener
from softprune.lab.train.run import resume, start
from softprune.lab.train.trackers import Trackers

Scalars = dict[str, list[tuple[int, float]]]


def written(run: Path) -> Scalars:
    """Every tag's steps and values."""
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def expected(run: Path) -> Scalars:
    """The numbers of metrics.jsonl, as the float32 that an event holds."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found: Scalars = {}
    for row in rows:
        for key, value in row.items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if key not in ("epoch", "step") and number:
                found.setdefault(key, []).append((row["step"], float(np.float32(value))))
    return found


def test_events_are_the_lines_of_the_metrics(tiny: Callable[..., RunConfig], tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = ("train.epochs=3", "finetune.epochs=2", "records.eval_epochs=2")
    start(tiny("records.trackers=['tensorboard']", *settings), run)
    scalars = written(run)
    assert scalars == expected(run)
    assert [step for step, _ in scalars["train_loss"]] == [15, 30, 45, 60, 75]
    assert [step for step, _ in scalars["test_top1"]] == [30, 45, 60, 75]  # every second, and the last of each phase
    assert [step for step, _ in scalars["strength"]] == [15, 30, 45]  # fine-tuning has none
    assert {"test_loss", "test_top5", "train_top1", "lr", "channels", "params", "macs"} < set(scalars)


def test_a_run_without_the_setting_has_no_events(tiny: Callable[..., RunConfig], tmp_path: Path) -> None:
    start(tiny("train.epochs=1"), tmp_path / "run")
    assert not (tmp_path / "run" / "tensorboard").exists()


@pytest.mark.parametrize(("every", "kept"), [(2, [30]), (0, [])], ids=["checkpoint", "beginning"])
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
        start(tiny("records.trackers=['tensorboard']", f"records.checkpoint_epochs={every}"), run, listener=Crash())
    assert [step for step, _ in written(run)["lr"]] == [15, 30, 45]
    checkpoints = sorted(path.name for path in run.glob("checkpoints/*"))
    assert checkpoints == [f"step-{step:010d}.ckpt" for step in kept]
    resume(run)
    scalars = written(run)
    assert scalars == expected(run)  # also in seconds, which the first process had others of
    assert [step for step, _ in scalars["lr"]] == [15, 30, 45, 60]


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [
        ("tensorboard", "torch.utils.tensorboard", "tensorboard"),
        ("wandb", "wandb", "wandb"),
        ("mlflow", "mlflow", "mlflow-skinny"),
    ],
)
def test_a_missing_package_is_named_and_leaves_no_folder(
    tiny: Callable[..., RunConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    module: str,
    package: str,
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"pip install {package}"):
        start(tiny(f"records.trackers=['{name}']"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_is_resumed_where_the_package_of_its_tracker_is_missing(
    tiny: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    assert start(tiny("records.trackers=['tensorboard']", "train.epochs=1"), run, time_limit=0.0).stopped
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert resume(run).result is not None
    assert "the tracker tensorboard failed and is left out" in caplog.text
    assert "pip install tensorboard`)" in caplog.text


def test_an_unknown_tracker_is_refused_with_the_nearest_name(tiny: Callable[..., RunConfig]) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'tensorboard'"):
        tiny("records.trackers=['tensorbord']")


class FakeWandB(ModuleType):
    """Keeps what the module wandb is called with."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls: list[tuple[str, Any]] = []

    def init(self, **options: Any) -> "FakeWandB":
        self.calls.append(("init", options))
        self.id = options["id"] or "abc"
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.calls.append(("log", (step, values)))

    def finish(self) -> None:
        self.calls.append(("finish", None))


class FakeMLflow(ModuleType):
    """Keeps what MLflow's client is called with."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.entities = SimpleNamespace(
            Metric=lambda key, value, timestamp, step: SimpleNamespace(key=key, value=value, step=step)
        )
        self.params: dict[str, Any] = {}
        self.metrics: list[Any] = []
        self.ended: list[str] = []

    def MlflowClient(self) -> "FakeMLflow":
        return self

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        return f"experiment {name}"

    def create_run(self, experiment: str, run_name: str) -> Any:
        return SimpleNamespace(info=SimpleNamespace(run_id=f"{experiment}/{run_name}"))

    def log_param(self, run: str, key: str, value: Any) -> None:
        self.params[key] = value

    def log_batch(self, run: str, metrics: list[Any]) -> None:
        assert run == "experiment softprune/tiny"
        self.metrics += metrics

    def update_run(self, run: str, status: str) -> None:
        assert (run, status) == ("experiment softprune/tiny", "RUNNING")

    def get_metric_history(self, run: str, key: str) -> list[Any]:
        return [metric for metric in self.metrics if metric.key == key]

    def set_terminated(self, run: str) -> None:
        self.ended.append(run)


def row(step: int) -> Epoch:
    values = {"channels": 1, "params": 2, "macs": 3, "lr": 0.1, "train_loss": 0.5, "train_top1": 90.0}
    return Epoch(epoch=step // 10, step=step, seconds=1.0, images_per_second=10.0, **values)


def test_wandb_gets_the_settings_and_every_epoch_and_is_continued(
    tiny: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = tiny("records.trackers=['wandb']", "name=tiny")
    for step in (0, 10):
        trackers = Trackers(tmp_path, config, step)
        trackers.log_epoch(row(step + 10))
        trackers.close()
    assert [name for name, _ in fake.calls] == ["init", "log", "finish"] * 2
    first, again = (options for name, options in fake.calls if name == "init")
    assert (first["project"], first["name"], first["id"]) == ("softprune", "tiny", None)
    assert first["config"]["train"]["epochs"] == config.train.epochs
    assert (again["id"], again["resume"]) == ("abc", "allow")
    step, values = fake.calls[1][1]
    assert step == 10
    assert values["train_loss"] == 0.5
    assert "decided" not in values
    assert "step" not in values


def test_mlflow_gets_each_step_once(
    tiny: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    config = tiny("records.trackers=['mlflow']", "name=tiny")
    for steps in ((10, 20), (20, 30)):  # the run resumes from step 10
        trackers = Trackers(tmp_path, config)
        for step in steps:
            trackers.log_epoch(row(step))
        trackers.close()
    assert [metric.step for metric in fake.metrics if metric.key == "train_loss"] == [10, 20, 30]
    assert fake.params["train.epochs"] == config.train.epochs
    assert fake.ended == ["experiment softprune/tiny"] * 2


def test_a_tracker_that_fails_does_not_end_the_training(
    tiny: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeWandB()
    monkeypatch.setattr(fake, "log", lambda *_, **__: 1 / 0)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    trackers = Trackers(tmp_path, tiny("records.trackers=['wandb', 'tensorboard']"))
    for step in (10, 20):
        trackers.log_epoch(row(step))
    trackers.close()
    assert len(caplog.records) == 1
    assert "tracker wandb failed" in caplog.text
    assert [step for step, _ in written(tmp_path)["lr"]] == [10, 20]
