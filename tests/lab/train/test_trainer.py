"""The training loop: when checkpoints are written, what a listener hears, times, and warnings on the way."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from softprune.errors import ConfigError, ModelError, SoftpruneError
from softprune.lab.config.settings import RunConfig
from softprune.lab.runs.checkpoint import save_checkpoint
from softprune.lab.runs.result import Epoch, Totals
from softprune.lab.train.control import Listener, StopSignal
from softprune.lab.train.evaluate import Evaluator
from softprune.lab.train.run import resume, start
from softprune.lab.train.step import TrainStep
from softprune.lab.train.teacher import Teacher
from softprune.methods import SoftPruner

Tiny = Callable[..., RunConfig]
FEW = "data.batch_size=720"  # two steps an epoch


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps after which checkpoints are written."""
    steps, original = list[int](), save_checkpoint

    def save(folder: Path, step: int, state: dict[str, Any]) -> Path:
        steps.append(step)
        return original(folder, step, state)

    monkeypatch.setattr("softprune.lab.train.trainer.save_checkpoint", save)
    return steps


def test_checkpoints_by_steps_and_epochs(tiny: Tiny, tmp_path: Path, saved: list[int]) -> None:
    start(tiny(FEW, "records.checkpoint_steps=3", "records.checkpoint_epochs=2", "train.epochs=5"), tmp_path / "run")
    assert saved == [3, 4, 6, 8, 9, 10]


def test_checkpoints_by_time_come_within_and_after_epochs(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: list[int]
) -> None:
    class Clock(Listener):
        now = 0.0

        def monotonic(self) -> float:
            return self.now

        def on_step(self, done: int) -> None:
            self.now += 1

    clock = Clock()
    monkeypatch.setattr("softprune.lab.train.trainer.time", clock)
    start(tiny(FEW, "records.checkpoint_epochs=0", "records.checkpoint_seconds=2.5"), tmp_path / "run", listener=clock)
    assert saved == [3, 6, 8]


def test_times_are_those_of_training_and_count_on_after_a_stop(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Listener):
        """Lets a step take 1,000 s, and the evaluation of an epoch 5,000 s; asks for a stop after three steps."""

        passed = steps = 0

        def monotonic(self) -> float:
            return time.monotonic() + self.passed

        def on_step(self, done: int) -> None:
            self.passed += 1000
            self.steps += 1

        def evaluate(self, *args: Any, **options: Any) -> Any:
            self.passed += 5000
            return evaluate(*args, **options)

    slow, evaluate = Slow(), Evaluator.__call__
    monkeypatch.setattr("softprune.lab.train.history.time", slow)
    monkeypatch.setattr(StopSignal, "reason", lambda _: "a test" if slow.steps == 3 else None)
    monkeypatch.setattr(Evaluator, "__call__", lambda *args, **options: slow.evaluate(*args, **options))
    assert start(tiny(FEW, "train.epochs=2"), tmp_path / "run", listener=slow).stopped
    slow.passed = 0  # the clock of another process
    result = resume(tmp_path / "run", listener=slow).result
    assert result is not None
    assert [row.seconds for row in result.epochs] == pytest.approx([2000, 2000], abs=60)
    assert [row.images_per_second for row in result.epochs] == pytest.approx([0.72, 0.72], rel=0.03)
    assert result.images_per_second == pytest.approx(0.72, rel=0.03)
    assert result.wall_seconds == pytest.approx(2 * 7000, abs=60)


def test_a_listener_hears_every_event(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Heard(Listener):
        def on_phase(self, text: str) -> None:
            events.append(text.split()[0])

        def on_epoch_start(self, epoch: int, epochs: int, steps: int) -> None:
            events.append((epoch, epochs, steps))

        def on_step(self, done: int) -> None:
            events.append(done)

        def on_epoch(self, row: Epoch, dense: Totals) -> None:
            events.append((row.phase, row.macs <= dense.macs))

    def outputs(self: Teacher, images: Tensor) -> Tensor:
        events.append("taught")
        return taught(self, images)

    events, taught = list[Any](), Teacher.outputs
    monkeypatch.setattr(Teacher, "outputs", outputs)
    settings = (FEW, "train.epochs=2", "train.compact_at=1", "finetune.epochs=1", "train.dense_baseline=true")
    start(
        tiny(*settings, "train.dense_epochs=1", "train.recalibrate=1", "distill.teacher=baseline"),
        tmp_path / "run",
        listener=Heard(),
    )
    trained, tuned = ("train", True), ("finetune", True)
    baseline = ["training", (0, 1, 2), 1, 2, trained, "measuring"]
    steps = ("taught", 1, "taught", 2)
    pruned = ["training", (0, 3, 2), *steps, trained, "cutting", (1, 3, 2), *steps, trained]
    assert events == [*baseline, *pruned, "fine-tuning", (2, 3, 2), *steps, tuned, "measuring"]


def test_a_pruner_hears_how_many_steps_are_done(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = list[int]()
    monkeypatch.setattr(SoftPruner, "update_strength", lambda _, step: heard.append(step))
    start(tiny(FEW, "train.epochs=2", "finetune.epochs=1"), tmp_path / "run")
    assert heard == [1, 2, 3, 4]


def test_an_error_of_a_pruner_is_raised_after_that_of_the_weights(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = iter([0.0, float("nan")])

    def update(pruner: SoftPruner, step: int) -> None:
        next(pruner.model.parameters()).data.fill_(next(values))
        raise ModelError("no strength")

    monkeypatch.setattr(SoftPruner, "update_strength", update)
    with pytest.raises(ModelError, match="no strength"):
        start(tiny(FEW), tmp_path / "run")
    with pytest.raises(
        SoftpruneError, match=r"must be finite\. Got infinity or NaN in .* after step 0 \(epoch 0, batch 0"
    ):
        resume(tmp_path / "run")


COUNTING = """
from torch import nn
from tiny_networks import tiny

class Counting(nn.Sequential):
    def __init__(self, *parts):
        super().__init__(*parts)
        self.count = 0

    def forward(self, x):
        self.count += self.training
        return super().forward(x)

def counting(num_classes):
    return Counting(*tiny(num_classes))
"""


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch 2.13 warns of linear layers in emulated bf16
def test_slow_arithmetic_and_what_may_change_the_result_is_warned_of(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "counting_networks.py").write_text(COUNTING)
    monkeypatch.setattr("softprune.lab.train.run.has_fast_bf16", lambda device: False)
    settings = ("model.name=counting_networks:counting", "train.epochs=1", "train.precision=bf16")
    start(tiny(FEW, *settings), tmp_path / "run", time_limit=0)
    assert "bf16 is slow on this CPU" in caplog.text
    assert "training changes count, which no checkpoint holds" in caplog.text
    assert "another environment" not in caplog.text
    sessions = tmp_path / "run" / "sessions.jsonl"
    sessions.write_text(re.sub(r'"torch": ?"[^"]*"', '"torch": "1.0"', sessions.read_text()))
    resume(tmp_path / "run")
    assert "the run is resumed in another environment (torch 1.0 before, " in caplog.text


def test_an_operator_without_a_deterministic_algorithm_is_named(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_so = "does not have a deterministic implementation, but you set 'torch.use_deterministic_algorithms(True)'"
    errors = iter([RuntimeError(f"cumsum_cuda_kernel {set_so}. You can turn it off."), RuntimeError("CUDA error")])

    def epoch(*_: Any) -> None:
        raise next(errors)

    monkeypatch.setattr(TrainStep, "epoch", epoch)
    with pytest.raises(ConfigError, match=re.escape(f"Got: cumsum_cuda_kernel {set_so}. Set train.deterministic = ")):
        start(tiny(FEW), tmp_path / "run")
    with pytest.raises(RuntimeError, match="CUDA error"):
        resume(tmp_path / "run")
