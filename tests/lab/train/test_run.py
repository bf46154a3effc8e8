"""The whole run: what it leaves behind, and that stopping and going on changes nothing."""

import dataclasses
import json
import logging
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import assert_same, final_state, metrics

import softprune
from softprune.errors import CheckpointError, ConfigError, SoftpruneError
from softprune.lab.config.recipes import load_recipe
from softprune.lab.config.settings import RunConfig
from softprune.lab.data import ArrayDataset, load_data
from softprune.lab.runs.networks import build_network
from softprune.lab.train.control import Listener
from softprune.lab.train.run import Outcome, absolute_paths, dense_config, open_data, resume, set_arithmetic, start
from softprune.lab.train.trainer import Trainer

Tiny = Callable[..., RunConfig]


class StopAt(Listener):
    """Asks for a stop as SIGTERM would, after given numbers of steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
        self.left = after
        monkeypatch.setattr("softprune.lab.train.control.StopSignal.reason", lambda _: self.reason())

    def reason(self) -> str | None:
        return "a test" if self.left <= 0 else None

    def on_step(self, done: int) -> None:
        self.left -= 1


def run_in_pieces(config: RunConfig, out: Path, pieces: list[int], monkeypatch: pytest.MonkeyPatch) -> Outcome:
    """The run, stopped after each of the given numbers of steps."""
    with monkeypatch.context() as patch:
        outcome = start(config, out, listener=StopAt(patch, pieces[0]))
    for piece in pieces[1:]:
        assert outcome.stopped == "a test"
        with monkeypatch.context() as patch:
            outcome = resume(out, listener=StopAt(patch, piece))
    assert outcome.stopped == "a test"
    return resume(out)


@pytest.mark.quick  # the smoke test of the package
def test_a_run_leaves_its_records(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny()
    outcome = start(config, tmp_path / "run")
    assert outcome.stopped is None
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert outcome.result is not None
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [0, 1, 2, 3]
    assert rows == result["epochs"]
    assert rows[-1]["step"] == 4 * 15
    assert result["best"]["top1"] == max(row["test_top1"] for row in rows)
    assert result["last"]["top1"] == rows[-1]["test_top1"]
    assert result["environment"]["torch"] == torch.__version__
    assert result["config"]["optimizer"]["lr"] == 0.1
    dense, masked, compact = result["table"]
    assert [row["name"] for row in result["table"]] == ["dense", "masked", "compact"]
    assert dense["top1"] is None, "no baseline was asked for, so no accuracy is claimed"
    assert masked["top1"] == compact["top1"] == rows[-1]["test_top1"]
    assert compact["macs"] == rows[-1]["macs"] == result["compact"]["macs"] < dense["macs"]
    assert compact["params"] == rows[-1]["params"] < dense["params"]
    assert compact["file_bytes"] < dense["file_bytes"] == masked["file_bytes"]
    assert all(row["latency_ms"] > 0 for row in result["table"])
    assert (result["inputs"]["shape"], result["inputs"]["classes"]) == ([1, 8, 8], [*"0123456789"])
    assert [site["name"] for site in result["sites"]] == ["1", "4", "7"]
    assert all(site["kept"] == sum(site["keep"]) for site in result["sites"])
    assert sum(site["kept"] for site in result["sites"]) == rows[-1]["channels"] < 8 + 12 + 16
    assert [module["name"] for module in result["modules"]] == ["0", "3", "6", "11"], "what multiplies"
    assert sum(module["macs_compact"] for module in result["modules"]) == compact["macs"]
    small = softprune.load(tmp_path / "run" / "compact.safetensors", build_network(config.model.name, 10))
    assert sum(p.numel() for p in small.parameters()) == compact["params"]
    # Who may read the run may read its network.
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len({path.stat().st_mode for path in files}) == 1


def test_the_folder_of_another_run_is_never_overwritten(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny("train.epochs=1")
    start(config, tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="softprune resume"):
        start(config, tmp_path / "run")
    assert resume(tmp_path / "run").result is not None  # finished: nothing to do
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    first, second = start(config), start(config)
    assert (first.folder.path, second.folder.path) == (Path("runs/tiny"), Path("runs/tiny-2"))


ADAMW = ("optimizer.name=adamw", "optimizer.lr=0.01")


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("train.compact_at=2", "train.accumulate=2"),
        ("finetune.epochs=2", "train.recalibrate=3", "train.label_smoothing=0.1"),
        ("train.ema=0.9", "method.strength_warmup_epochs=2", "schedule.warmup_epochs=1"),
        ("method.name=dense",),
        (*ADAMW, "data.mixup=0.2", "data.cutmix=1", "data.holdout=45", "train.compact_at=2"),
    ],
    ids=["plain", "compact_at", "finetune", "ema", "dense", "adamw"],
)
def test_stopping_and_going_on_changes_nothing(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    config = tiny(*overrides)
    whole = start(config, tmp_path / "whole")
    # Within an epoch, at the end of the second (where compact_at = 2 is due), and within the last.
    steps = 15 * (config.train.epochs + config.finetune.epochs)
    pieces = run_in_pieces(config, tmp_path / "pieces", [4, 26, steps - 34], monkeypatch)
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "pieces")
    assert_same(final_state(tmp_path / "whole"), final_state(tmp_path / "pieces"))
    assert whole.result is not None
    assert pieces.result is not None
    for key in ("best", "last", "compact", "sites", "modules"):
        assert getattr(whole.result, key) == getattr(pieces.result, key)
    for ours, theirs in zip(whole.result.table, pieces.result.table, strict=True):
        assert ours.model_copy(update={"latency_ms": 0.0}) == theirs.model_copy(update={"latency_ms": 0.0})


STATEFUL = """
import numpy as np
import torch
from torch import nn
from tiny_networks import tiny

class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        if not self.training:
            return x
        with torch.no_grad():
            self.calls += 1
        return x + 0.01 * self.calls + 0.1 * float(np.random.standard_normal())

def noisy(num_classes):
    return nn.Sequential(Noisy(), tiny(num_classes))
"""


def test_state_outside_the_state_dict_survives_a_stop(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A buffer that is not persistent, and NumPy's generator in the forward pass."""
    (tmp_path / "stateful_networks.py").write_text(STATEFUL)
    config = tiny("train.epochs=2", "model.name=stateful_networks:noisy")
    np.random.seed(0)  # noqa: NPY002
    start(config, tmp_path / "whole")
    np.random.seed(0)  # noqa: NPY002
    with monkeypatch.context() as patch:
        assert start(config, tmp_path / "pieces", listener=StopAt(patch, 19)).stopped
    np.random.seed(1)  # noqa: NPY002  (another process)
    resume(tmp_path / "pieces")
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "pieces")
    assert_same(final_state(tmp_path / "whole"), final_state(tmp_path / "pieces"))


def test_held_out_images_judge_epochs_and_test_images_the_result(tiny: Tiny, tmp_path: Path) -> None:
    short = ("train.epochs=1", "data.holdout=237")
    dense = start(tiny(*short, "method.name=dense"), tmp_path / "dense").result
    result = start(tiny(*short, f"model.weights={tmp_path / 'dense'}"), tmp_path / "run").result
    assert dense is not None
    assert result is not None
    rows = metrics(tmp_path / "run")
    # 237 and 360 images: their percentages are different fractions.
    assert all((row["test_top1"] * 237 / 100) == pytest.approx(round(row["test_top1"] * 2.37)) for row in rows)
    assert all(row.top1 * 3.6 == pytest.approx(round(row.top1 * 3.6)) for row in result.table)
    assert result.table[0].top1 == dense.table[0].top1, "of the weights that the run began with"
    assert result.best.top1 == max(row["test_top1"] for row in rows)
    assert result.config.data.holdout == 237


def test_every_session_of_a_run_is_in_its_record(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny()
    commands = iter(["softprune train", "softprune resume", "softprune resume --time-limit 9"])
    monkeypatch.setattr("softprune.lab.runs.environment.command_line", lambda: next(commands))
    outcome = run_in_pieces(config, tmp_path / "run", [5, 15], monkeypatch)
    assert outcome.result is not None
    sessions = outcome.result.sessions
    # 15 steps an epoch: stopped after 5, then after 15 more.
    assert [(each.epoch, each.batch) for each in sessions] == [(0, 0), (0, 5), (1, 5)]
    assert [each.command.split()[1] for each in sessions] == ["train", "resume", "resume"]
    assert outcome.result.command == "softprune train"
    assert outcome.result.environment == sessions[-1].environment
    assert all(each.environment.torch == torch.__version__ for each in sessions)
    assert sessions[0].started <= sessions[-1].started <= outcome.result.finished


def test_a_cut_in_mid_training_shrinks_what_is_trained(tiny: Tiny, tmp_path: Path) -> None:
    outcome = start(tiny("train.compact_at=3", "method.strength=0.018"), tmp_path / "run")
    state = final_state(tmp_path / "run")
    first_cut = outcome.result.epochs[2]
    trained = sum(
        value.numel() for name, value in state["model"].items() if "running" not in name and "num" not in name
    )
    assert trained == first_cut.params
    assert len(state["cuts"]) == 1
    assert all(
        state["stage"]["optimizer"][name]["momentum_buffer"].shape == state["model"][name].shape
        for name in state["stage"]["optimizer"]
    )
    # What was cut at epoch 3 is still accounted for, at the dense network's widths.
    assert [site.width for site in outcome.result.sites] == [8, 12, 16]
    assert outcome.result.compact.params <= first_cut.params < outcome.result.dense.params
    for site in outcome.result.sites:
        assert set(state["model"][f"{site.name}.weight"].tolist()) <= set(site.gamma)
        assert all(site.gamma), "also of the channels that were cut at epoch 3"


@pytest.mark.parametrize("optimizer", [(), ADAMW], ids=["sgd", "adamw"])
def test_a_cut_that_removes_nothing_changes_nothing(tiny: Tiny, tmp_path: Path, optimizer: tuple[str, ...]) -> None:
    """Momentum and noise continue."""
    settings = ("train.epochs=2", "data.batch_size=480", "method.strength=0.0", *optimizer)
    start(tiny(*settings), tmp_path / "whole")
    start(tiny(*settings, "train.compact_at=1"), tmp_path / "cut")
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "cut")
    assert len(final_state(tmp_path / "cut")["cuts"]) == 1


def test_an_export_of_an_earlier_cut_is_named(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        start(tiny(), tmp_path / "run", listener=StopAt(patch, 20))
    (tmp_path / "run" / "compact.onnx").write_text("of a trial cut")
    with caplog.at_level("WARNING", "softprune"):
        assert resume(tmp_path / "run").result is not None
    assert "compact.onnx is an export of an earlier cut" in caplog.text
    assert caplog.text.count("is an export of an earlier cut") == 1


def test_fine_tuning_trains_the_compact_network(tiny: Tiny, tmp_path: Path) -> None:
    outcome = start(tiny("finetune.epochs=2", "finetune.lr=0.02"), tmp_path / "run")
    rows = outcome.result.epochs
    assert [row.phase for row in rows] == ["train"] * 4 + ["finetune"] * 2
    assert [row.macs for row in rows[3:]] == [rows[3].macs] * 3
    assert rows[4].strength is None
    assert rows[4].lr == pytest.approx(0.01 * (1 + math.cos(math.pi * 14 / 30)))  # of the last of 15 steps
    assert outcome.result.best.epoch >= 4  # of what is shipped
    assert [row.name for row in outcome.result.table] == ["dense", "masked", "compact"]
    assert [row.latency_ms is None for row in outcome.result.table] == [False, True, False], "no masked network is left"
    assert outcome.result.table[2].top1 == rows[-1].test_top1


def test_the_dense_baseline_comes_first_and_gives_the_dense_row(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny("train.dense_baseline=true", "train.epochs=2")
    outcome = start(config, tmp_path / "run")
    alone = start(dense_config(config), tmp_path / "alone")
    assert metrics(tmp_path / "run" / "dense") == metrics(tmp_path / "alone")
    assert outcome.result.table[0].top1 == alone.result.last.top1


def test_a_run_starts_from_its_own_baseline(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tiny("train.dense_baseline=true", "train.dense_epochs=1", "model.weights=baseline", "train.epochs=2")
    outcome = start(own, tmp_path / "own")
    start(tiny("train.epochs=2", f"model.weights={tmp_path}/own/dense"), tmp_path / "named")
    assert metrics(tmp_path / "own") == metrics(tmp_path / "named")
    assert outcome.folder.read_config().model.weights == "baseline"
    with monkeypatch.context() as patch:
        assert start(own, tmp_path / "parts", listener=StopAt(patch, 15)).stopped
    assert (tmp_path / "parts" / "dense" / "result.json").is_file(), "nothing is left to stop"
    resume(tmp_path / "parts")
    assert metrics(tmp_path / "own") == metrics(tmp_path / "parts")


def test_a_baseline_may_start_from_pretrained_weights(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "pretrained_tiny.py").write_text(
        "import torch\nfrom tiny_networks import tiny\n"
        "def net(num_classes=10, pretrained=False):\n"
        "    with torch.random.fork_rng():\n"
        "        torch.manual_seed(1 if pretrained else 2)\n"
        "        return tiny(num_classes)\n"
    )
    net = "model.name=pretrained_tiny:net"
    short = (net, "train.epochs=1", "method.target.macs=0.5", "distill.teacher=baseline", "train.dense_baseline=true")
    own = tiny(*short, "model.weights=baseline", "model.pretrained=true")
    start(own, tmp_path / "own")
    baseline = tiny(net, "train.epochs=1", "method.name=dense", "model.pretrained=true")
    start(baseline, tmp_path / "baseline")
    assert metrics(tmp_path / "own" / "dense") == metrics(tmp_path / "baseline")
    named = tiny(*short[:3], f"distill.teacher={tmp_path}/baseline", f"model.weights={tmp_path}/baseline")
    start(named, tmp_path / "named")
    assert metrics(tmp_path / "own") == metrics(tmp_path / "named")


def test_a_damaged_checkpoint_costs_only_the_way_back(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny("records.checkpoint_steps=9")
    start(config, tmp_path / "whole")
    with monkeypatch.context() as patch:
        start(config, tmp_path / "run", listener=StopAt(patch, 35))
    newest = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    newest.write_bytes(newest.read_bytes()[:-100])
    with caplog.at_level(logging.WARNING):
        resume(tmp_path / "run")
    assert "resuming from the checkpoint before" in caplog.text
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "run")
    assert_same(final_state(tmp_path / "whole"), final_state(tmp_path / "run"))


def test_a_run_that_died_before_its_first_checkpoint_starts_again(tiny: Tiny, tmp_path: Path) -> None:
    from softprune.lab.runs.folder import RunFolder

    config = tiny("train.epochs=1")
    RunFolder.create(tmp_path / "run", config)
    (tmp_path / "run" / "metrics.jsonl").write_text('{"epoch": 0, "torn')
    assert resume(tmp_path / "run").result is not None
    assert len(metrics(tmp_path / "run")) == 1


def test_a_run_without_a_whole_checkpoint_is_refused_every_time(tiny: Tiny, tmp_path: Path) -> None:
    start(tiny(), tmp_path / "run", time_limit=0)
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        path.write_bytes(b"")
    for _ in range(3):
        with pytest.raises(CheckpointError, match="At least one checkpoint must be complete"):
            resume(tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        path.unlink()
    assert resume(tmp_path / "run").result is not None


def test_a_session_that_saved_nothing_is_in_the_record_too(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    commands = iter(["softprune train tiny", "softprune resume run"])
    monkeypatch.setattr("softprune.lab.runs.environment.command_line", lambda: next(commands))
    caplog.set_level("INFO", "softprune")
    with monkeypatch.context() as patch:
        patch.setattr("softprune.lab.train.trainer.Trainer._run_epoch", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            start(tiny(), tmp_path / "run")
    assert "from the beginning" not in caplog.text
    result = resume(tmp_path / "run").result
    assert "training starts from the beginning" in caplog.text
    assert result is not None
    assert [each.command for each in result.sessions] == ["softprune train tiny", "softprune resume run"]
    assert result.command == "softprune train tiny"


def test_a_full_disk_stops_the_run_and_loses_nothing(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno
    import os

    config = tiny("records.checkpoint_steps=9")
    start(config, tmp_path / "whole")
    replace, left = os.replace, [4]

    def full(source: Path, target: Path) -> None:
        if str(target).endswith(".ckpt"):
            left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    monkeypatch.setattr("softprune.io.os.replace", full)
    with pytest.raises(CheckpointError, match="make room"):
        start(config, tmp_path / "run")
    monkeypatch.setattr("softprune.io.os.replace", replace)
    assert resume(tmp_path / "run").result is not None
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "run")
    assert_same(final_state(tmp_path / "whole"), final_state(tmp_path / "run"))


@pytest.mark.parametrize("settings", [[], ["method.target.macs=0.5", "method.final_at=0.9"]])
def test_a_loss_that_is_not_finite_names_the_step_the_images_and_the_checkpoint(
    tiny: Tiny, tmp_path: Path, settings: list[str]
) -> None:
    config = tiny("schedule.kind=step", "schedule.milestones=[2]", "schedule.factor=1e30", *settings)
    with pytest.raises(SoftpruneError) as caught:
        start(config, tmp_path / "run")
    message = str(caught.value)
    assert re.search(r"in step 3[0-9] \(epoch 2, batch [0-9]\)", message)
    assert "indices [" in message
    assert re.search(r"The last checkpoint with finite weights is \S*step-0000000030\.ckpt", message)
    # What it says to do can be done.
    recipe, weights = re.findall(r"softprune train (\S+) --set optimizer\.lr=\.\.\. --set (\S+)`", message)[0]
    again = load_recipe(recipe, ("optimizer.lr=1e-6", weights, "schedule.factor=1", "train.epochs=1"))
    assert start(again, tmp_path / "again").result is not None


@pytest.mark.parametrize("name", ["3.weight", "1.running_var"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_weights_that_are_not_finite_are_never_saved(tiny: Tiny, tmp_path: Path, name: str, bad: float) -> None:
    class Spoil(Listener):
        def on_step(self, done: int) -> None:
            if done == 11:
                spoilt[0] = True

    spoilt, original = [False], Trainer.save

    def save(trainer: Trainer) -> Path | None:
        if spoilt[0]:
            with torch.no_grad():
                trainer.stage.network.state_dict()[name].view(-1)[0] = bad
        return original(trainer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "save", save)
        with pytest.raises(SoftpruneError, match=rf"must be finite.*in {name} after step 11 \(epoch 0") as caught:
            start(tiny("records.checkpoint_steps=6"), tmp_path / "run", listener=Spoil())
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-0000000006.ckpt"]
    assert f"--set model.weights={tmp_path / 'run'}" in str(caught.value)


def test_weights_are_looked_at_before_an_epoch_is_written(tiny: Tiny, tmp_path: Path) -> None:
    class Spoil(Listener):
        def on_step(self, done: int) -> None:
            if done == 15:
                torch.nn.init.constant_(trainers[0].stage.network[3].weight, float("nan"))

    trainers: list[Trainer] = []
    made = Trainer.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "run", lambda trainer: (trainers.append(trainer), made(trainer))[1])
        with pytest.raises(SoftpruneError, match="There is no checkpoint yet: start a new run with `softprune train"):
            start(tiny(), tmp_path / "run", listener=Spoil())
    assert metrics(tmp_path / "run") == []


def test_going_on_with_other_images_is_refused(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        start(tiny("train.epochs=1"), tmp_path / "run", listener=StopAt(patch, 3))
    data = load_data("digits")
    fewer = ArrayDataset(data.train.images[:-5], data.train.labels[:-5], data.train.mean, data.train.std)
    renamed = tuple("abcdefghij")
    for other, found in (
        (dataclasses.replace(data, train=fewer), r"Got 1432 training images instead of 1437\. .* --data-dir"),
        (dataclasses.replace(data, class_names=renamed), "other class names"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr("softprune.lab.train.run.load_data", lambda *_, other=other, **__: other)
            with pytest.raises(CheckpointError, match=found):
                resume(tmp_path / "run")
    assert resume(tmp_path / "run").result is not None


def test_an_edited_configuration_is_not_mixed_with_an_old_checkpoint(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        start(tiny(), tmp_path / "run", listener=StopAt(patch, 3))
    path = tmp_path / "run" / "config.toml"
    path.write_text(path.read_text().replace("lr = 0.1", "lr = 0.2"))
    with pytest.raises(CheckpointError, match=r"another configuration, optimizer\.lr = 0\.2 instead of 0\.1: restore"):
        resume(tmp_path / "run")


def test_a_run_names_its_files_by_absolute_paths(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = ("data.dir=one", "model.weights=two", "distill.teacher=three", "method.options.plan=four")
    config = absolute_paths(tiny("method.name=scratch", *files))
    found = config.data.dir, config.model.weights, config.distill.teacher, config.method.options["plan"]
    assert found == tuple(str(tmp_path / name) for name in ("one", "two", "three", "four"))
    own = absolute_paths(tiny("method.name=my_methods:Own", "method.options.plan=fast"))
    assert own.method.options["plan"] == "fast"


@pytest.mark.parametrize("steps", [3, 16], ids=["checkpoint", "result"])
def test_an_edited_configuration_is_not_mixed_with_an_old_baseline(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    config = tiny("train.dense_baseline=true", "train.epochs=1")
    with monkeypatch.context() as patch:
        start(config, tmp_path / "run", listener=StopAt(patch, steps))
    shutil.rmtree(tmp_path / "run" / "checkpoints", ignore_errors=True)  # as if killed before the first one
    path = tmp_path / "run" / "config.toml"
    path.write_text(path.read_text().replace("lr = 0.1", "lr = 0.2"))
    with pytest.raises(CheckpointError, match=rf"dense/.* optimizer\.lr = 0\.2 instead of 0\.1: restore {path}, or"):
        resume(tmp_path / "run")


@pytest.mark.parametrize(("precision", "products"), [("fp32", "highest"), ("tf32", "high"), ("bf16", "high")])
def test_precision_and_threads_are_set_for_the_process(
    monkeypatch: pytest.MonkeyPatch, precision: str, products: str
) -> None:
    before = torch.get_float32_matmul_precision(), torch.get_num_threads()
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", precision == "fp32")
    try:
        set_arithmetic(RunConfig(train={"precision": precision, "threads": 2}), torch.device("cpu"))
        assert (torch.get_float32_matmul_precision(), torch.get_num_threads()) == (products, 2)
        assert torch.backends.cudnn.allow_tf32 is (precision != "fp32")
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.set_num_threads(before[1])


@pytest.mark.parametrize("wanted", [True, False])
def test_who_only_reads_a_run_downloads_nothing(monkeypatch: pytest.MonkeyPatch, wanted: bool) -> None:
    asked = list[bool]()
    monkeypatch.setattr("softprune.lab.train.run.load_data", lambda *_, download, **__: asked.append(download))
    config = RunConfig(data={"download": wanted})
    open_data(config, torch.device("cpu"))
    open_data(config, torch.device("cpu"), download=False)
    assert asked == [wanted, False]


def test_training_starts_from_the_weights_of_another_run(tiny: Tiny, tmp_path: Path) -> None:
    start(tiny("method.name=dense", "train.epochs=2"), tmp_path / "first")
    outcome = start(
        tiny(f"model.weights={tmp_path / 'first'}", "train.epochs=1", "optimizer.lr=1e-6"), tmp_path / "second"
    )
    before, after = metrics(tmp_path / "first")[-1], outcome.result.epochs[0]
    assert abs(before["test_top1"] - after.test_top1) < 10
    assert before["test_top1"] > 40


@pytest.mark.parametrize(
    "settings",
    [
        ("method.name=slimming", "method.options.ratio=1.5"),
        ("method.target.macs=2",),
        ("method.target.macs=1e-9",),
        ("model.weights=gone.safetensors",),
    ],
)
def test_what_a_method_refuses_is_refused_before_anything_is_trained(
    tiny: Tiny, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    with pytest.raises(SoftpruneError):
        start(tiny("train.dense_baseline=true", *settings), tmp_path / "run")
    assert not (tmp_path / "run").exists()
