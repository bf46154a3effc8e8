"""The latency benchmark, tiny and on the CPU."""

import importlib
import json

import pytest
import torch

from softprune import cost, models


@pytest.fixture(scope="module")
def latency():
    return importlib.import_module("latency")


def test_a_record_is_extended(latency, tmp_path, monkeypatch) -> None:
    out = tmp_path / "latency-tiny.json"
    tiny = ["--out", str(out), "--models", "resnet20", "--backends", "eager", "--repeats", "2", "--threads", "1"]
    monkeypatch.setitem(latency.CUT, "resnet20", 0.5)
    first = latency.main([*tiny, "--batches", "1", "--round-to", "1"])
    both = latency.main([*tiny, "--batches", "1", "2", "--round-to", "1"])
    assert both["rows"][0] == first["rows"][0]
    assert [row["batch"] for row in both["rows"]] == [1, 2]
    assert both == json.loads(out.read_text())
    assert both["rows"][0]["realised"] == pytest.approx(both["rows"][0]["speed_up"] / both["rows"][0]["mac_ratio"])


@pytest.mark.parametrize("multiple", [1, 8])
def test_the_share_that_goes_is_met(latency, multiple: int) -> None:
    model, example = models.build("digits_net", 10), torch.randn(1, 1, 8, 8)
    small = latency.cut_at_random(model, example, 0.5, multiple)
    assert 0.3 < cost(small, example).macs / cost(model, example).macs <= 0.5
    widths = {module.out_channels for module in small.modules() if isinstance(module, torch.nn.Conv2d)}
    assert all(width % multiple == 0 for width in widths)
