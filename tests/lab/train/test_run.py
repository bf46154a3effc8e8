"""The whole run: what it leaves behind, what it refuses, and that stopping and resuming changes nothing."""

import dataclasses
import errno
import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import StopAt, assert_same, final_state, metrics

import softprune
from softprune.cut import read_plans
from softprune.errors import CheckpointError, ConfigError, SoftpruneError
from softprune.lab.config.settings import RunConfig
from softprune.lab.data import ArrayDataset, load_data
from softprune.lab.runs.networks import build_network
from softprune.lab.train.run import Outcome, Trainer, absolute_paths, check, dense_config, resume, start

Tiny = Callable[..., RunConfig]
FEW = "data.batch_size=720"  # two steps an epoch
ADAMW = ("optimizer.name=adamw", "optimizer.lr=0.01")


def run_in_pieces(config: RunConfig, out: Path, pieces: list[int]) -> Outcome:
    """The run, stopped after each of the given numbers of steps."""
    for number, piece in enumerate(pieces):
        stop = StopAt(piece)
        outcome = resume(out, listener=stop) if number else start(config, out, listener=stop)
        assert outcome.stopped == "SIGTERM"
    return resume(out)


@pytest.mark.quick  # the smoke test of the package
def test_a_run_leaves_its_records(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny()
    run = tmp_path / "run"
    assert start(config, run).stopped is None
    result = json.loads((run / "result.json").read_text())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows == result["epochs"]
    assert [(row["epoch"], row["step"]) for row in rows] == [(0, 15), (1, 30), (2, 45), (3, 60)]
    assert rows[-1]["penalty"] < rows[0]["penalty"], "shifts and scales fall"
    assert result["best"]["top1"] == max(row["test_top1"] for row in rows)
    assert result["last"]["top1"] == rows[-1]["test_top1"]
    dense, masked, compact = result["table"]
    assert [row["name"] for row in result["table"]] == ["dense", "masked", "compact"]
    assert dense["top1"] is None, "no baseline was asked for, so no accuracy is claimed"
    assert masked["top1"] == compact["top1"] == rows[-1]["test_top1"]
    assert compact["macs"] == rows[-1]["macs"] == result["compact"]["macs"] < dense["macs"]
    assert compact["params"] == rows[-1]["params"] < dense["params"]
    assert compact["file_bytes"] < dense["file_bytes"] == masked["file_bytes"]
    assert all(row["latency_ms"] > 0 for row in result["table"])
    assert [(site["name"], site["width"]) for site in result["sites"]] == [("1", 8), ("4", 12), ("7", 16)]
    assert sum(site["kept"] for site in result["sites"]) == rows[-1]["channels"] < 8 + 12 + 16
    assert [module["name"] for module in result["modules"]] == ["0", "3", "6", "11"], "what multiplies"
    assert sum(module["macs_compact"] for module in result["modules"]) == compact["macs"]
    small = softprune.load(run / "compact.safetensors", build_network(config.model.name, 10))
    assert sum(p.numel() for p in small.parameters()) == compact["params"]
    assert len({path.stat().st_mode for path in run.rglob("*") if path.is_file()}) == 1
    # A finished run is neither trained nor overwritten.
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="softprune resume"):
        start(config, run)
    assert resume(run).result is not None
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "overrides",
    [
        ("train.compact_at=2",),
        ("finetune.epochs=2", "train.label_smoothing=0.1", "schedule.warmup_epochs=1"),
        ("method.name=dense",),
        (*ADAMW, "data.holdout=45", "method.target.macs=0.5"),
    ],
    ids=["compact_at", "finetune", "dense", "adamw"],
)
def test_stopping_and_resuming_changes_nothing(tiny: Tiny, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    config = tiny("train.epochs=3", *overrides)
    whole = start(config, tmp_path / "whole")
    # Within an epoch, at the end of the second (where compact_at = 2 is due), and within the last.
    steps = 15 * (config.train.epochs + config.finetune.epochs)
    pieces = run_in_pieces(config, tmp_path / "pieces", [4, 26, steps - 34])
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "pieces")
    assert_same(final_state(tmp_path / "whole"), final_state(tmp_path / "pieces"))
    for key in ("best", "last", "compact", "sites", "modules"):
        assert getattr(whole.result, key) == getattr(pieces.result, key)


def test_cuts_on_the_way_and_fine_tuning(tiny: Tiny, tmp_path: Path) -> None:
    settings = ("train.compact_at=2", "train.epochs=3", "finetune.epochs=1", "finetune.lr=0.02")
    result = start(tiny(*settings, "method.strength=0.05"), tmp_path / "run").result
    rows, state = result.epochs, final_state(tmp_path / "run")
    weights = [value for name, value in state["model"].items() if "running" not in name and "num" not in name]
    assert sum(map(torch.numel, weights)) == result.compact.params <= rows[1].params < result.dense.params
    assert len(state["cuts"]) == 2
    for name, each in state["stage"]["optimizer"].items():
        assert each["momentum_buffer"].shape == state["model"][name].shape
    # What was cut at first is still accounted for, at the dense network's widths.
    assert [site.width for site in result.sites] == [8, 12, 16]
    assert [row.phase for row in rows] == ["train"] * 3 + ["finetune"]
    assert rows[3].macs == rows[2].macs
    assert (rows[3].strength, rows[3].penalty) == (None, None)
    assert rows[3].lr == pytest.approx(0.01 * (1 + math.cos(math.pi * 14 / 15)))  # of the last of 15 steps
    assert result.best.epoch == 3  # of what is shipped
    assert [row.latency_ms is None for row in result.table] == [False, True, False], "no masked network is left"
    assert result.table[2].top1 == rows[-1].test_top1


def test_a_cut_that_removes_nothing_changes_nothing(tiny: Tiny, tmp_path: Path) -> None:
    """Momentum and noise continue."""
    settings = ("train.epochs=2", "data.batch_size=480", "method.strength=0.0", *ADAMW)
    start(tiny(*settings), tmp_path / "whole")
    start(tiny(*settings, "train.compact_at=1"), tmp_path / "cut")
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "cut")
    assert len(final_state(tmp_path / "cut")["cuts"]) == 1


def test_a_run_starts_from_its_own_baseline(tiny: Tiny, tmp_path: Path) -> None:
    short = ("train.epochs=2", "train.dense_baseline=true", "train.dense_epochs=1")
    own = tiny(*short, "model.weights=baseline", "distill.teacher=baseline")
    outcome = start(own, tmp_path / "own")
    alone = start(dense_config(own), tmp_path / "alone").result
    assert metrics(tmp_path / "own" / "dense") == metrics(tmp_path / "alone")
    dense = tmp_path / "own" / "dense"
    start(tiny("train.epochs=2", f"model.weights={dense}", "distill.teacher=start"), tmp_path / "named")
    assert metrics(tmp_path / "own") == metrics(tmp_path / "named")
    assert outcome.result.table[0].top1 == alone.last.top1
    assert start(own, tmp_path / "parts", listener=StopAt(20)).stopped
    resume(tmp_path / "parts")
    assert metrics(tmp_path / "own") == metrics(tmp_path / "parts")


def test_held_out_images_judge_epochs_and_test_images_the_result(tiny: Tiny, tmp_path: Path) -> None:
    short = ("train.epochs=1", "data.holdout=237")
    dense = start(tiny(*short, "method.name=dense"), tmp_path / "dense").result
    result = start(tiny(*short, f"model.weights={tmp_path / 'dense'}"), tmp_path / "run").result
    # 237 and 360 images: their percentages are different fractions.
    for row in metrics(tmp_path / "run"):
        assert row["test_top1"] * 2.37 == pytest.approx(round(row["test_top1"] * 2.37))
    assert all(row.top1 * 3.6 == pytest.approx(round(row.top1 * 3.6)) for row in result.table if row.top1)
    assert result.table[0].top1 == dense.table[0].top1, "of the weights that the run began with"


def test_a_full_disk_loses_nothing(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, run = tiny(), tmp_path / "run"
    start(config, tmp_path / "whole")
    replace, left = os.replace, [2]

    def full(source: Path, target: Path) -> None:
        left[0] -= str(target).endswith(".ckpt")
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("softprune.io.os.replace", full)
        with pytest.raises(CheckpointError, match="free some space"):
            start(config, run)
    assert resume(run).result is not None
    assert metrics(tmp_path / "whole") == metrics(run)
    assert_same(final_state(tmp_path / "whole"), final_state(run))


def test_a_loss_that_is_not_finite_names_step_and_images(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny("schedule.kind=step", "schedule.milestones=[1]", "schedule.factor=1e30")
    with pytest.raises(SoftpruneError, match=r"in step 1[5-9] \(epoch 1, batch [0-4]\).*images .*Lower"):
        start(config, tmp_path / "run")


def test_weights_that_are_not_finite_are_never_saved(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Trainer.save

    def save(trainer: Trainer) -> None:
        if trainer.history.epoch == 2:
            trainer.network.state_dict()["1.running_var"][0] = math.nan
        original(trainer)

    monkeypatch.setattr(Trainer, "save", save)
    with pytest.raises(SoftpruneError, match=r"must be finite.*in 1\.running_var after step 3 \(epoch 1, batch 1"):
        start(tiny(FEW), tmp_path / "run")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-0000000002.ckpt"]


def test_only_what_the_run_began_with_is_resumed(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    assert start(tiny("train.epochs=1", "train.dense_baseline=true"), run, time_limit=0).stopped
    data = load_data("digits")
    fewer = ArrayDataset(data.train.images[:-5], data.train.labels[:-5], data.train.mean, data.train.std)
    for other, found in (
        (dataclasses.replace(data, train=fewer), "training images = 1432 instead of 1437"),
        (dataclasses.replace(data, class_names=tuple("abcdefghij")), "class names"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr("softprune.lab.train.run.open_data", lambda *_, other=other, **__: other)
            with pytest.raises(CheckpointError, match=found):
                resume(run)
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace("lr = 0.1", "lr = 0.2"))
    with pytest.raises(CheckpointError, match=r"dense/.* optimizer\.lr = 0\.2 instead of 0\.1"):
        resume(run)
    # Loader processes decide nothing.
    (run / "config.toml").write_text(text.replace("workers = 8", "workers = 3"))
    assert resume(run, data_dir="elsewhere").result is not None


def test_paths_are_absolute_and_folders_are_found(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    files = ("data.dir=~/one", "model.weights=two", "distill.teacher=three", "method.options.plan=four")
    config = absolute_paths(tiny("method.name=scratch", *files))
    found = config.data.dir, config.model.weights, config.distill.teacher, config.method.options["plan"]
    assert found == tuple(str(tmp_path / name) for name in ("one", "two", "three", "four"))
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    assert check(tiny(), device="cpu").folder.path == Path("runs/tiny-2")


OTHER_OUTPUTS = """
from tiny_networks import tiny
from torch import nn

class Heads(nn.Sequential):
    def forward(self, x):
        return (super().forward(x),) * 2 if self.training else super().forward(x)

def two_heads(num_classes):
    return Heads(*tiny(num_classes))

def seven_classes(num_classes):
    return tiny(7)
"""


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("method.name=slimming", "method.options.ratio=1.5"), "ratio"),
        (("method.name=slimming", "train.compact_at=1"), "can continue after a cut"),
        (("method.target.macs=1e-9",), "target"),
        (("model.weights=gone.safetensors",), "No such file"),
        (("model.name=other_outputs:two_heads",), "Got tuple .* in training"),
        (("model.name=other_outputs:seven_classes",), r"Got \(2, 7\) for 2 images"),
        (("distill.teacher=nowhere.pt",), "distill.teacher must be a trained dense network"),
        (("train.epochs=0", "finetune.epochs=1", "model.pretrained=true"), "Got scp"),
        (("train.epochs=0", "finetune.epochs=1", "method.name=l1"), "random weights"),
        (("train.epochs=0", "model.pretrained=true", "method.name=l1"), r"finetune\.epochs = 0"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    tiny: Tiny, tmp_path: Path, settings: tuple[str, ...], message: str
) -> None:
    (tmp_path / "other_outputs.py").write_text(OTHER_OUTPUTS)
    with pytest.raises(SoftpruneError, match=message):
        start(tiny(*settings), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_one_shot_cuts_before_its_only_training(tiny: Tiny, tmp_path: Path) -> None:
    start(tiny("method.name=dense", "train.epochs=1"), tmp_path / "dense")
    settings = ("train.epochs=0", "finetune.epochs=2", "method.name=l1", "method.target.macs=0.5")
    result = start(tiny(*settings, f"model.weights={tmp_path / 'dense'}"), tmp_path / "run").result
    assert [row.phase for row in result.epochs] == ["finetune"] * 2
    assert result.compact.macs <= 0.5 * result.dense.macs
    assert result.table[0].top1 is not None, "of the weights that the run began with"


def test_round_to_auto_is_chosen_once_in_a_run(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = iter([4, 2])
    monkeypatch.setattr("softprune.methods.pruner.default_multiple", lambda device: next(measured))
    config = tiny("method.round_to=auto", "train.compact_at=1", "train.epochs=2", FEW)
    assert start(config, tmp_path / "run", listener=StopAt(1)).stopped
    result = resume(tmp_path / "run").result
    assert result.round_to == 4
    plan = read_plans(tmp_path / "run" / "compact.safetensors")[-1]
    assert all(len(cut.outputs) % 4 == 0 for name, cut in plan.modules.items() if name != "11")
    assert next(measured) == 2
