"""The time in a run's table."""

import logging
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from softprune.lab.train import evaluate as latency
from softprune.lab.train.evaluate import latency_ms


class _Slow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.modes: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(self.training)
        time.sleep(0.002)
        return x


def test_it_is_the_time_of_a_forward_in_eval_mode() -> None:
    network = _Slow().train()
    assert 2 <= latency_ms(network, torch.zeros(1)) < 20
    assert not any(network.modes)
    assert network.training


def test_a_failing_network_keeps_its_modes() -> None:
    network = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).eval())
    with pytest.raises(RuntimeError, match="shapes"):
        latency_ms(network, torch.zeros(1, 4))
    assert [module.training for module in network.modules()] == [True, True, False]


def test_a_recorded_forward_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def capture(body: Any, device: torch.device, *, trial: Any, undo: Any) -> Any:
        trial()
        undo()
        return type("Graph", (), {"replay": staticmethod(lambda: calls.append("replay"))})

    monkeypatch.setattr(latency, "capture_graph", capture)
    network = _Slow().eval()
    latency._captured_forward(network, torch.zeros(1))()
    assert (len(network.modes), calls) == (1, ["replay"])


def test_what_cannot_be_recorded_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def capture(*_: Any, **__: Any) -> Any:
        raise RuntimeError("operation not permitted")

    monkeypatch.setattr(latency, "capture_graph", capture)
    network = _Slow().eval()
    with caplog.at_level(logging.INFO):
        latency._captured_forward(network, torch.zeros(1))()
    assert len(network.modes) == 1
    assert "cannot be captured: operation not permitted" in caplog.text


@pytest.mark.gpu
def test_a_gpu_replays_the_forward() -> None:
    network = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(50))).cuda()
    batch = torch.zeros(1, 8, 8, 8, device="cuda")
    began = time.perf_counter()
    with torch.no_grad():
        network(batch)
    torch.cuda.synchronize()
    assert 0 < latency_ms(network, batch) < 1000 * (time.perf_counter() - began)
    assert network.training
