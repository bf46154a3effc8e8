"""CUDA graphs without a GPU."""

from typing import Any

import pytest
import torch


@pytest.fixture
def played_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Play CUDA graphs on the CPU: warm-up, undo, a recording that runs nothing, then replays."""

    def capture(body: Any, device: torch.device, *, trial: Any, undo: Any) -> Any:
        for _ in range(3):
            trial()
        undo()
        return type("Graph", (), {"replay": staticmethod(body)})

    monkeypatch.setattr("softprune.lab.train.step.capture_graph", capture)
    monkeypatch.setattr("softprune.lab.train.step.TrainStep._captures", True)
