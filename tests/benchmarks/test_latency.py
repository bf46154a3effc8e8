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
    tiny = ["--out", str(out), "--models", "resnet20", "--backends", "eager", "--repeats", "2", "--threads", "1"]
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
    again = ["--out", str(merged), *tiny[2:], "--merge", str(out)]
    rows = latency.main([*again, "--batches", "2", "3", "--round-to", "1"])["rows"]
    assert rows[:2] == [row | {"measurements": 1} for row in both["rows"]]
    assert [row["batch"] for row in rows] == [1, 2, 3]
    page = latency.render([both])
    assert "1 | eager | float32 | 1 |" in page
    assert f"{100 / row['mac_ratio']:.1f}%" in page


def _row(dense: float, spread: float = 0.01, **key: object) -> dict[str, object]:
    times = {"median_ms": dense, "low_ms": dense * (1 - spread), "high_ms": dense * (1 + spread)}
    values = {"model": "vgg16", "dtype": "float32", "backend": "eager", "round_to": "8", "multiple": 8, "batch": 1}
    values |= {"gathers": True, "fold_bn": False, "dense": times, "compact": times, "speed_up": 1.0}
    return values | {"speed_up_spread": [1.0, 1.0], "mac_ratio": 2.0, "realised": 0.5, "note": ""} | key


def test_of_several_measurements_the_fastest_stays(latency) -> None:
    rows = [
        _row(2.0, batch=64),
        _row(5.0),
        _row(3.0),
        _row(4.0),
        _row(1.0, model="resnet50"),
        _row(1.0, own_order=True),
    ]
    best = latency.least_disturbed(rows)
    assert [(row["model"], row["batch"], row["dense"]["median_ms"], row["measurements"]) for row in best] == [
        ("vgg16", 1, 3.0, 3),
        ("vgg16", 64, 2.0, 1),
        ("vgg16", 1, 1.0, 1),
        ("resnet50", 1, 1.0, 1),
    ]
    assert latency.least_disturbed([*best, _row(9.0)])[0]["measurements"] == 4


def test_rows_that_were_disturbed_have_a_star(latency) -> None:
    record = {"environment": {"device": "d", "torch": "t", "threads": 1}, "repeats": 2}
    page = latency.render([record | {"rows": [_row(1.0, 0.04), _row(1.0, 0.06, batch=2)]}])
    assert "| vgg16 | 8 | eager | float32 | 1 |" in page
    assert "| vgg16* | 8 | eager | float32 | 2 |" in page


def test_a_record_of_another_machine_is_not_extended(latency, tmp_path, monkeypatch) -> None:
    out = tmp_path / "latency-tiny.json"
    environment = {"device": "an abacus", "torch": torch.__version__, "threads": 1}
    out.write_text(json.dumps({"environment": environment, "rows": []}))
    with pytest.raises(SystemExit, match="give another --out"):
        latency.main(["--out", str(out), "--models", "vgg16"])


@pytest.mark.parametrize("multiple", [1, 8])
def test_the_share_that_goes_is_met(latency, multiple: int) -> None:
    model, example = models.build("digits_net", 10), torch.randn(1, 1, 8, 8)
    small = latency.cut_at_random(model, example, 0.5, multiple)
    kept = cost(small, example).macs / cost(model, example).macs
    assert 0.3 < kept <= 0.5
    widths = {module.out_channels for module in small.modules() if isinstance(module, torch.nn.Conv2d)}
    assert all(width % multiple == 0 for width in widths)


def test_a_multiple_as_wide_as_a_site_empties_none(latency) -> None:
    model, example = models.build("resnet20", 10), torch.randn(1, 3, 32, 32)
    small = latency.cut_at_random(model, example, 0.9, 16)
    assert 0.1 < cost(small, example).macs / cost(model, example).macs < 0.9
    widths = {module.out_channels for module in small.modules() if isinstance(module, torch.nn.Conv2d)}
    assert 16 in widths
    assert all(width % 16 == 0 for width in widths)  # those of the residual streams, too
