"""Images that cannot be read in the middle of a run: what was trained is saved, and mending them is enough to go on."""

import dataclasses
import errno
import multiprocessing
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import assert_same, final_state, metrics

from softprune.errors import DataError
from softprune.io import unwritable
from softprune.lab.config.settings import RunConfig
from softprune.lab.runs.checkpoint import read_newest
from softprune.lab.runs.result import Epoch, Totals
from softprune.lab.train.control import Listener
from softprune.lab.train.from_checkpoint import compact_run, evaluate_folder
from softprune.lab.train.run import resume, start
from softprune.lab.train.trainer import Trainer
from softprune.methods.sfp import SfpPruner

Image = pytest.importorskip("PIL.Image", reason='the "vision" extra is not installed')

_STEPS = 4
_NETWORK = """
from torch import nn
from tiny_networks import block

def coloured(num_classes):
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, num_classes)]
    return nn.Sequential(*block(3, 8, 2), *block(8, 12, 1), *block(12, 16, 2), *head)
"""


@pytest.fixture
def config(tiny: Callable[..., RunConfig], tmp_path: Path) -> Callable[..., RunConfig]:
    """Makes configurations of a run of four steps an epoch on photographs, whose only checkpoints are the last one
    and those that the run saves on its own account."""
    generator = torch.Generator().manual_seed(0)
    for split, count in {"train": 16, "val": 3}.items():
        for label, name in enumerate(("ant", "bee")):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = torch.randint(100, (20, 20, 3), generator=generator, dtype=torch.uint8)
                pixels[..., label] += 100
                Image.fromarray(pixels.numpy()).save(folder / f"{i}.png")
    (tmp_path / "coloured_networks.py").write_text(_NETWORK)

    def make(*overrides: str) -> RunConfig:
        return tiny(
            "model.name=coloured_networks:coloured",
            "data.name=folder",
            f"data.dir={tmp_path / 'images'}",
            "data.image_size=8",
            "data.batch_size=8",
            "data.workers=0",
            "method.strength=0.5",
            "records.checkpoint_epochs=0",
            *overrides,
        )

    return make


class Break(Listener):
    """Tears every image of a split when a moment of the run has come; :meth:`mend` undoes it."""

    def __init__(self, images: Path, split: str, *, step: int = 0, epoch: int = -1, stage: str = "") -> None:
        self.files = {path: path.read_bytes() for path in (images / split).glob("*/*.png")}
        self.steps, self.epoch, self.stage = step, epoch, stage

    def on_step(self, done: int) -> None:
        self.steps -= 1
        if self.steps == 0:
            self.tear()

    def on_epoch(self, row: Epoch, dense: Totals) -> None:
        if row.epoch == self.epoch:
            self.tear()

    def on_phase(self, text: str) -> None:
        if self.stage and self.stage in text:
            self.tear()

    def tear(self) -> None:
        for path, content in self.files.items():
            path.write_bytes(content[:60])

    def mend(self) -> None:
        for path, content in self.files.items():
            path.write_bytes(content)


@pytest.mark.parametrize(
    ("overrides", "split", "moment", "epoch", "batch"),
    [
        # Batches are read one ahead: the torn one is noticed before the one that was read already is trained on.
        ((), "train", {"step": 6}, 1, 2),
        (("data.workers=1",), "train", {"epoch": 1}, 2, 0),
        (("method.name=dense",), "train", {"step": 10}, 2, 2),
        (("train.ema=0.9",), "val", {"step": 6}, 1, _STEPS),
        (("train.compact_at=2",), "train", {"stage": "cutting"}, 2, 0),
        (("finetune.epochs=2",), "train", {"stage": "fine-tuning"}, 4, 0),
        (("finetune.epochs=2", "train.recalibrate=3"), "train", {"epoch": 3}, 4, 0),
        (("finetune.epochs=2",), "val", {"epoch": 3}, 4, 0),
        ((), "val", {"stage": "measuring"}, 4, 0),
    ],
    ids=["step", "epoch", "dense", "test", "cut", "finetune", "recalibrate", "conclude", "finish"],
)
def test_a_run_goes_on_as_if_its_images_had_always_been_whole(
    config: Callable[..., RunConfig],
    tmp_path: Path,
    overrides: tuple[str, ...],
    split: str,
    moment: dict[str, Any],
    epoch: int,
    batch: int,
) -> None:
    start(config(*overrides), tmp_path / "whole")
    broken = Break(tmp_path / "images", split, **moment)
    with pytest.raises(DataError) as caught:
        start(config(*overrides), tmp_path / "run", listener=broken)
    saved, state = read_newest(tmp_path / "run" / "checkpoints")
    assert (state["epoch"], state["batch"]) == (epoch, batch)
    message = str(caught.value)
    assert re.search(rf"Got {tmp_path}/images/{split}/\w+/\d+\.png, which is not: ", message)
    assert "saved" in message
    assert message.endswith(
        f"`softprune resume {tmp_path / 'run'} --model coloured_networks:coloured` then resumes from {saved}."
    )
    with pytest.raises(DataError, match=r"/\d+\.png, which is not: .* then resumes from "):
        resume(tmp_path / "run")  # nothing was mended
    broken.mend()
    outcome = resume(tmp_path / "run")
    assert outcome.result is not None
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert_same(final_state(tmp_path / "run"), final_state(tmp_path / "whole"))


class _KillWorker(Listener):
    """Kills the loader's workers after some steps, as a system out of memory does."""

    def __init__(self, step: int) -> None:
        self.steps = step

    def on_step(self, done: int) -> None:
        self.steps -= 1
        if self.steps == 0:
            for worker in multiprocessing.active_children():
                assert worker.pid is not None
                os.kill(worker.pid, signal.SIGKILL)
                worker.join()


def test_a_killed_worker_costs_nothing(config: Callable[..., RunConfig], tmp_path: Path) -> None:
    start(config("data.workers=1"), tmp_path / "whole")
    with pytest.raises(DataError, match=r"exited unexpectedly\. .* saved\. .* then resumes from "):
        start(config("data.workers=1"), tmp_path / "run", listener=_KillWorker(6))
    _, state = read_newest(tmp_path / "run" / "checkpoints")
    assert state["epoch"] == 1
    resume(tmp_path / "run")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert_same(final_state(tmp_path / "run"), final_state(tmp_path / "whole"))


def test_a_failed_save_does_not_hide_the_image(
    config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(self: Trainer) -> None:
        raise MemoryError("no room for the archive")

    monkeypatch.setattr(Trainer, "save", save)
    broken = Break(tmp_path / "images", "train", step=2)
    with pytest.raises(DataError, match=r"\.png, which is not: .* MemoryError: no room for the archive\."):
        start(config(), tmp_path / "run", listener=broken)


def test_a_method_ends_an_epoch_once(
    config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []
    monkeypatch.setattr(SfpPruner, "end_epoch", lambda _, epoch: ended.append(epoch))
    broken = Break(tmp_path / "images", "val", step=6)
    with pytest.raises(DataError, match="Every finished step is saved"):
        start(config("method.name=sfp"), tmp_path / "run", listener=broken)
    broken.mend()
    resume(tmp_path / "run")
    assert ended == [0, 1, 2, 3]


def test_images_in_memory_are_read_only_at_the_start(config: Callable[..., RunConfig], tmp_path: Path) -> None:
    settings = config("data.in_memory=true", "train.epochs=2")
    start(settings, tmp_path / "whole")
    start(settings, tmp_path / "run", listener=Break(tmp_path / "images", "train", step=3))
    assert_same(final_state(tmp_path / "run"), final_state(tmp_path / "whole"))


def test_a_run_in_memory_is_evaluated_and_cut_without_its_training_images(
    config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    result = start(config("data.in_memory=true", "train.epochs=1"), run).result
    assert result is not None
    for image in (tmp_path / "images" / "train").glob("*/*.png"):
        image.write_bytes(b"no image")
    own: dict[str, Any] = {"model": "coloured_networks:coloured"}
    found = evaluate_folder(run, **own)
    assert {name: totals.top1 for name, totals in found.items()} == {
        row.name: row.top1 for row in result.table if row.name in ("masked", "compact")
    }
    compact, _, _ = compact_run(run, tmp_path / "again.safetensors", **own)
    assert_same(load_file(compact), load_file(run / "compact.safetensors"))


def test_a_run_in_memory_is_recalibrated_on_the_batches_of_its_training(
    config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    start(config("data.in_memory=true", "train.epochs=1", "train.recalibrate=2"), run)
    compact, _, _ = compact_run(run, tmp_path / "again.safetensors", model="coloured_networks:coloured")
    assert_same(load_file(compact), load_file(run / "compact.safetensors"))


def test_the_baseline_of_a_run_goes_on_with_the_run(config: Callable[..., RunConfig], tmp_path: Path) -> None:
    settings = config("train.dense_baseline=true", "train.epochs=2")
    start(settings, tmp_path / "whole")
    broken = Break(tmp_path / "images", "train", step=3)
    again = f"`softprune resume {tmp_path / 'run'} --model coloured_networks:coloured`"
    with pytest.raises(DataError, match=f"{again} then resumes from .*/run/dense/"):
        start(settings, tmp_path / "run", listener=broken)
    broken.mend()
    resume(tmp_path / "run")
    for folder in ("", "dense"):
        assert_same(final_state(tmp_path / "run" / folder), final_state(tmp_path / "whole" / folder))


def test_a_full_disk_at_that_moment_hides_neither_error(
    config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: object, *, then: str) -> None:
        raise unwritable(path, OSError(errno.ENOSPC, "No space left on device"), then)

    monkeypatch.setattr("softprune.lab.runs.checkpoint.write_atomically", full)
    both = r"\.png, which is not: .* could not be saved: The disk must have room .* from the beginning"
    with pytest.raises(DataError, match=both):
        start(config(), tmp_path / "run", listener=Break(tmp_path / "images", "train", step=2))


def test_several_processes_go_on_from_their_last_checkpoint(
    config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = Trainer._run_epoch

    def as_one_of_two(trainer: Trainer) -> str | None:
        try:
            return train(trainer)
        except DataError:
            trainer.world = dataclasses.replace(trainer.world, size=2)
            raise

    monkeypatch.setattr(Trainer, "_run_epoch", as_one_of_two)
    with pytest.raises(DataError, match=r"Several processes cannot save .* from \S*step-0000000003\.ckpt\."):
        start(
            config("records.checkpoint_steps=3"), tmp_path / "run", listener=Break(tmp_path / "images", "train", step=5)
        )
