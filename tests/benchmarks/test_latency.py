"""The latency benchmark's script, tiny and on the CPU."""

import importlib
import json

import pytest
import torch

from softprune import cost, models


@pytest.fixture(scope="module")
def latency():
    return importlib.import_module("latency")


def test_measures_extends_and_renders(latency, tmp_path, monkeypatch) -> None:
    out = tmp_path / "latency-tiny.json"
    tiny = [
        "--out",
        str(out),
        "--models",
        "resnet20",
        "--backends",
        "eager",
        "--repeats",
        "2",
        "--threads",
        "1",
    ]
    monkeypatch.setitem(latency.CUT, "resnet20", 0.5)
    first = latency.main([*tiny, "--batches", "1", "--round-to", "1"])
    assert [(row["batch"], row["multiple"]) for row in first["rows"]] == [(1, 1)]
    both = latency.main([*tiny, "--batches", "1", "2", "--round-to", "1"])
    assert both["rows"][0] == first["rows"][0]
    assert [row["batch"] for row in both["rows"]] == [1, 2]
    assert both == json.loads(out.read_text())
    row = both["rows"][0]
    assert 2.0 <= row["mac_ratio"] < 2.2
    assert row["realised"] == pytest.approx(row["speed_up"] / row["mac_ratio"])
    merged = tmp_path / "latency-merged.json"
    again = ["--out", str(merged), *tiny[2:], "--merge", str(out), "--lock", str(tmp_path / "lock")]
    rows = latency.main([*again, "--batches", "2", "3", "--round-to", "1"])["rows"]
    assert rows[:2] == both["rows"]
    assert [row["batch"] for row in rows] == [1, 2, 3]
    page = latency.render([both])
    assert "| resnet20 | 1 | eager | float32 | 1 |" in page
    assert f"{100 / row['mac_ratio']:.1f}%" in page


def test_a_record_of_another_machine_is_not_extended(latency, tmp_path, monkeypatch) -> None:
    out = tmp_path / "latency-tiny.json"
    environment = {"device": "an abacus", "torch": torch.__version__, "threads": 1}
    out.write_text(json.dumps({"environment": environment, "rows": []}))
    with pytest.raises(SystemExit, match="give another --out"):
        latency.main(["--out", str(out), "--models", "vgg16"])


@pytest.mark.parametrize("multiple", [1, 8])
def test_the_share_that_goes_is_met(latency, multiple: int) -> None:
    model, example = models.build("digits_net", 10), torch.randn(1, 1, 8, 8)
    small = latency.cut_by_lot(model, example, 0.5, multiple)
    kept = cost(small, example).macs / cost(model, example).macs
    assert 0.3 < kept <= 0.5
    widths = {module.out_channels for module in small.modules() if isinstance(module, torch.nn.Conv2d)}
    assert all(width % multiple == 0 for width in widths)


def test_a_multiple_as_wide_as_a_site_empties_none(latency) -> None:
    model, example = models.build("resnet20", 10), torch.randn(1, 3, 32, 32)
    small = latency.cut_by_lot(model, example, 0.9, 16)
    assert 0.1 < cost(small, example).macs / cost(model, example).macs < 0.9
    widths = {module.out_channels for module in small.modules() if isinstance(module, torch.nn.Conv2d)}
    assert 16 in widths
    assert all(width % 16 == 0 for width in widths)  # those of the residual streams, too
