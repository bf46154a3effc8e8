"""Resuming: what a checkpoint must hold besides the weights, and what is warned of."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from softprune.errors import CheckpointError
from softprune.lab.runs.checkpoint import save_checkpoint
from softprune.lab.runs.environment import describe_session
from softprune.lab.runs.folder import RunFolder
from softprune.lab.runs.resume import (
    PlainAttributes,
    check_same_classes,
    check_same_images,
    describe_images,
    load_unsaved_buffers,
    restart_hint,
    resume_hint,
    unsaved_buffers,
    warn_of_changes,
)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.register_buffer("kept", torch.zeros(()))
        self.count = 0
        self.scale = 2.0
        self.mode = "slow"

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.count += 1
        return x * self.scale


def test_buffers_outside_the_state_dict_are_saved() -> None:
    network = nn.Sequential(Counting(), nn.BatchNorm1d(2))
    network(torch.ones(4, 2))
    saved = unsaved_buffers(network)
    assert list(saved) == ["0.calls"]
    other = nn.Sequential(Counting(), nn.BatchNorm1d(2))
    load_unsaved_buffers(other, saved)
    assert other[0].calls == 1
    load_unsaved_buffers(other, {"0.calls": torch.ones(3), "gone": torch.ones(())})
    assert other[0].calls == 1, "a network that was cut since has buffers of other shapes, or fewer"


def test_python_values_that_training_changes_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    network = nn.Sequential(Counting(), nn.BatchNorm1d(2))
    attributes = PlainAttributes(network)
    network.eval()
    attributes.check(network)
    assert not caplog.records
    network[0].mode, network[0].scale = "fast", 3.0
    network[1].num_features = 1  # of PyTorch's own modules: a cut changes it
    for _ in range(2):
        network(torch.ones(4, 2))
        attributes.check(network)
    (record,) = caplog.records
    assert "training changes 0.count, 0.mode, 0.scale, which no checkpoint holds" in record.getMessage()


def test_another_environment_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    before = describe_session(torch.device("cpu"), 1, epoch=0, batch=0)
    warn_of_changes([before], before)
    warn_of_changes([], before)
    assert not caplog.records
    other = before.environment.model_copy(update={"threads": 7, "torch": "2.0"})
    with caplog.at_level(logging.WARNING):
        warn_of_changes([before.model_copy(update={"environment": other})], before)
    assert "torch 2.0 before" in caplog.text
    assert f"threads 7 before, {torch.get_num_threads()} now" in caplog.text
    assert "The batch of all processes" not in caplog.text
    caplog.clear()
    gpu = before.environment.model_copy(update={"device": "NVIDIA H200", "cuda": "12.8", "cudnn": "9"})
    older = gpu.model_copy(update={"cuda": "12.4", "threads": 7, "processes": 2})
    warn_of_changes([before.model_copy(update={"environment": older})], before.model_copy(update={"environment": gpu}))
    first, second = (record.getMessage() for record in caplog.records)
    assert "(processes 2 before, 1 now; cuda 12.4 before, 12.8 now)" in first
    assert "The batch of all processes together stays the same" in second


def test_advice_after_an_error_names_the_checkpoint_and_the_rate(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    again = f"`softprune train {folder.config} --set"
    assert resume_hint(folder).endswith("resumes from the beginning, since there is no checkpoint yet.")
    none = "There is no checkpoint yet: start a new run with "
    assert restart_hint(folder, finetuning=False, cut=True) == f"{none}{again} optimizer.lr=...`."
    folder.checkpoints.mkdir()
    last = save_checkpoint(folder.checkpoints, 3, {})
    assert resume_hint(folder).endswith(f"resumes from {last}.")
    weights = f"start a new run from its weights with {again} optimizer.lr=... --set model.weights={tmp_path}`"
    assert f"is {last}: {weights}, or without" in restart_hint(folder, finetuning=False, cut=False)
    cut = restart_hint(folder, finetuning=True, cut=True)
    assert cut.endswith(f"since the network was cut in training, start a new run with {again} finetune.lr=...`.")


def images(train: int = 6, test: int = 3, classes: int = 2, names: tuple[str, ...] = ("ant", "bee")) -> Any:
    return SimpleNamespace(train=range(train), test=range(test), num_classes=classes, class_names=names)


def test_other_images_and_classes_are_refused(tmp_path: Path) -> None:
    state, folder = {"data": describe_images(images())}, RunFolder(tmp_path)
    check_same_images(images(), state, folder)
    for other, got in (
        (images(train=5), "5 training images instead of 6"),
        (images(test=4, classes=3), "4 test images instead of 3, 3 classes instead of 2"),
        (images(names=("bee", "ant")), "other class names"),
    ):
        with pytest.raises(CheckpointError, match=f"that it began with. Got {got}. Restore"):
            check_same_images(other, state, folder)
    check_same_classes(images(train=0, test=9), state)
    check_same_classes(images(names=()), state)
    check_same_classes(images(), {"data": describe_images(images(names=()))})
    for other in (images(classes=3), images(names=("bee", "ant"))):
        with pytest.raises(CheckpointError, match=r"it was trained on. Got . \(.*\) instead of 2 \(ant, bee\)"):
            check_same_classes(other, state)
