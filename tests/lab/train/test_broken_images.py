"""Images that cannot be read in the middle of a run: what was trained is saved, and mending them is enough to go on."""

import multiprocessing
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import assert_same, final_state, metrics

from softprune.errors import DataError
from softprune.lab.config.settings import RunConfig
from softprune.lab.runs.checkpoint import read_newest
from softprune.lab.runs.result import Epoch, Totals
from softprune.lab.train.control import Listener
from softprune.lab.train.run import resume, start
from softprune.methods import SfpPruner

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
        ((), "val", {"step": 6}, 1, _STEPS),
        (("train.compact_at=2",), "train", {"stage": "cutting"}, 2, 0),
        (("finetune.epochs=2",), "val", {"epoch": 3}, 4, 0),
        ((), "val", {"stage": "measuring"}, 4, 0),
    ],
    ids=["step", "epoch", "test", "cut", "finetune", "finish"],
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
    at = read_newest(tmp_path / "run" / "checkpoints")[1]["history"]
    assert (at["epoch"], at["batch"]) == (epoch, batch)
    message = str(caught.value)
    assert re.search(rf"Got {tmp_path}/images/{split}/\w+/\d+\.png, which is not: ", message)
    assert "saved" in message
    assert f"`softprune resume {tmp_path / 'run'} --model coloured_networks:coloured`" in message
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
    with pytest.raises(DataError, match=r"exited unexpectedly\. .* fewer data\.workers .* then resumes the run"):
        start(config("data.workers=1"), tmp_path / "run", listener=_KillWorker(6))
    _, state = read_newest(tmp_path / "run" / "checkpoints")
    assert state["history"]["epoch"] == 1
    settings = tmp_path / "run" / "config.toml"
    settings.write_text(settings.read_text().replace("workers = 1", "workers = 0"))  # as the message says
    resume(tmp_path / "run")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert_same(final_state(tmp_path / "run"), final_state(tmp_path / "whole"))


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
