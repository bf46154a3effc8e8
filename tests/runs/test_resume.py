"""Resuming: what a checkpoint must hold besides the weights, and what is warned of."""

import logging

import pytest
import torch
from torch import Tensor, nn

from softprune.runs.environment import describe_session
from softprune.runs.resume import PlainAttributes, load_unsaved_buffers, unsaved_buffers, warn_of_changes


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.register_buffer("kept", torch.zeros(()))
        self.count = 0
        self.scale = 2.0

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


def test_python_values_that_training_changes_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    network = nn.Sequential(Counting(), nn.BatchNorm1d(2))
    attributes = PlainAttributes(network)
    network.eval()
    attributes.check(network)
    assert not caplog.records
    for _ in range(2):
        network(torch.ones(4, 2))
        attributes.check(network)
    (record,) = caplog.records
    assert "training changes 0.count, which no checkpoint holds" in record.getMessage()


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
