"""Dense against compact: every runtime is measured as asked, and what makes a compact network slow is named."""

import copy
import functools
import gc
import itertools
import json
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from export_networks import Dense, compacted
from torch import nn

from softprune import bench
from softprune.bench import BenchReport, BenchRow, Runtime, Timing, advice, alternate, compare_latency, paired_ratio
from softprune.costs import Cost
from softprune.errors import ConfigError
from softprune.graph.modules import Select


def test_eager_and_onnx_runtime_rows() -> None:
    pytest.importorskip("onnxruntime", reason='the "onnx" extra is not installed')
    pytest.importorskip("onnxscript", reason='the "onnx" extra is not installed')
    dense, compact, example = compacted("residual")
    threads = torch.get_num_threads()
    report = compare_latency(
        dense, compact, example, backends=("eager", "onnxruntime"), batches=(2,), threads=1, repeats=3
    )
    assert torch.get_num_threads() == threads
    assert [(row.backend, row.batch) for row in report.rows] == [("eager", 2), ("onnxruntime", 2)]
    assert report.compact_macs < report.dense_macs
    for row in report.rows:
        assert row.note == ""
        assert row.threads == 1
        assert len(row.dense.blocks) == 3
        assert row.mac_ratio == report.dense_macs / report.compact_macs
        assert row.realised == pytest.approx(row.speed_up / row.mac_ratio)
        low, high = row.ratio.spread
        assert low <= row.speed_up <= high
    text = str(report)
    assert "realised" in text
    assert "onnxruntime" in text
    record = json.loads(json.dumps([row.to_dict() for row in report.rows]))
    assert record[0]["dense"]["blocks"] == 3
    assert record[0]["compact"]["low_ms"] <= record[0]["compact"]["median_ms"]


def test_compiled_networks_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a backend that is quick; test_what_survives.py compiles a compact network with the default one."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    report = compare_latency(model, model, torch.randn(1, 4), backends=("compile",), batches=(2,), repeats=2)
    (row,) = report.rows
    assert row.speed_up is not None
    assert row.mac_ratio == 1


def test_a_cuda_graph_keeps_the_input_that_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "capture_graph", lambda *_, **__: SimpleNamespace(replay=lambda: None))
    given = torch.zeros(2, 3)
    kept = weakref.ref(given)
    replay = Runtime(backend="graph", device="cuda").captured(functools.partial(torch.relu, given))
    del given
    replay()
    gc.collect()
    assert kept() is not None


def test_half_precision_on_a_gpu_is_channels_last(monkeypatch) -> None:
    assert Runtime(device="cuda:0", dtype="float16").channels_last
    assert not Runtime(dtype="bfloat16").channels_last
    monkeypatch.setattr(Runtime, "channels_last", True)
    placed = Runtime(dtype="float64").place(torch.zeros(2, 3, 4, 4))
    assert placed.is_contiguous(memory_format=torch.channels_last)
    assert placed.dtype == torch.float64


def test_both_networks_are_folded_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    dense, compact, example = compacted("residual")
    timed = []
    call = Runtime.call
    monkeypatch.setattr(Runtime, "call", lambda self, model, given: timed.append(model) or call(self, model, given))
    (plain,) = compare_latency(dense, compact, example, repeats=1).rows
    (row,) = compare_latency(dense, compact, example, repeats=1, fold_bn=True).rows
    assert row.mac_ratio == plain.mac_ratio
    before, folded = timed[:2], timed[2:]
    assert before == [dense, compact]
    for was, model in zip(before, folded, strict=True):
        norms = [sum(isinstance(each, nn.BatchNorm2d) for each in network.modules()) for network in (model, was)]
        assert norms[0] < norms[1]
        torch.testing.assert_close(model(example), copy.deepcopy(was).eval()(example), rtol=1e-3, atol=1e-5)


def test_what_a_backend_cannot_do_is_a_note() -> None:
    model = Dense().eval()
    report = compare_latency(
        model, model, torch.randn(1, 3, 8, 8), backends=("onnxruntime",), dtype="float64", repeats=1
    )
    (row,) = report.rows
    assert row.speed_up is None
    assert row.realised is None
    assert "float32" in row.note
    assert row.note in str(report)
    assert json.loads(json.dumps(row.to_dict()))["dense"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backends": ("tensorrt",)}, "A backend must be one of"),
        ({"dtype": "int8"}, "`dtype` must be one of"),
        ({"batches": [0]}, "A batch must have"),
    ],
)
def test_mistakes(options: dict[str, object], message: str) -> None:
    model = Dense().eval()
    with pytest.raises(ConfigError, match=message):
        compare_latency(model, model, torch.randn(1, 3, 8, 8), **options)  # type: ignore[arg-type]


ROW = BenchRow(dense=Timing((8.0,)), compact=Timing((10.0,)), mac_ratio=2.0)
FASTER = {"compact": Timing((5.0,))}
EVEN = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 8, 1), nn.Conv2d(16, 16, 3, groups=16))
ODD, DEPTHWISE = nn.Conv2d(8, 13, 3), nn.Conv2d(9, 9, 3, groups=9)
DENSE = Cost(macs=100, activations=100, params=1, channels=1, by_module={})
HALF = replace(DENSE, macs=50, activations=50)
GPU = replace(ROW, device="cuda", backend="graph")


@pytest.mark.parametrize(
    ("model", "rows", "compact", "causes"),
    [
        (EVEN, [ROW], HALF, []),
        (ODD, [replace(GPU, **FASTER), replace(GPU, dense=None)], DENSE, []),
        (ODD, [ROW], HALF, []),
        (nn.Sequential(EVEN, ODD, DEPTHWISE), [GPU], HALF, ["Widths: 1 convolutions and 1 depthwise"]),
        (nn.Sequential(EVEN, ODD), [replace(ROW, backend="onnxruntime")], HALF, ["Widths: 1 convolutions and 0"]),
        (nn.Sequential(EVEN, DEPTHWISE), [ROW], HALF, ["Widths: 0 convolutions and 1 depthwise"]),
        (nn.Sequential(EVEN, Select(torch.tensor([0, 2]), 4)), [ROW], HALF, ["Gathers: 1 layers"]),
        (EVEN, [ROW], replace(HALF, activations=85), ["Memory traffic: 50% of the MACs are left, but 85%"]),
        (EVEN, [GPU, replace(GPU, batch=64, **FASTER)], HALF, ["Batch: it is faster with 64 images"]),
        (EVEN, [replace(GPU, backend="eager")], HALF, ["Launches"]),
    ],
)
def test_each_cause_is_named(model: nn.Module, rows: list[BenchRow], compact: Cost, causes: list[str]) -> None:
    found = advice(rows, model, (DENSE, compact))
    assert len(found) == len(causes)
    for sentence, cause in zip(found, causes, strict=True):
        assert sentence.startswith(cause)
        assert sentence in str(BenchReport((), 2, 1, found))


def test_calls_take_turns_and_every_block_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("softprune.bench.BLOCK_SECONDS", 0.0)
    events: list[str] = []
    calls = {name: (lambda name=name: events.append(name)) for name in ("a", "b")}
    alternate(calls, repeats=3, warm_up=0, finish=lambda: events.append("wait"))
    assert events[0] == "wait"
    blocks = [name for name in events if name != "wait"][2:]  # the first two choose how many calls make a block
    assert blocks == ["a", "b", "b", "a", "a", "b"]
    assert all(after == "wait" for before, after in itertools.pairwise(events) if before != "wait")


def test_median_and_quartiles() -> None:
    timing = Timing((3.0, 1.0, 2.0, 5.0, 4.0))
    assert timing.median == 3.0
    assert timing.spread == (2.0, 4.0)
    assert str(timing) == "3 ms (2 to 4)"
    assert Timing((2.0,)).spread == (2.0, 2.0)


def test_ratios_are_taken_between_neighbours() -> None:
    # The machine became five times slower half way: both ratios are two all the same.
    slow, fast = Timing((2.0, 2.0, 10.0)), Timing((1.0, 1.0, 5.0))
    assert paired_ratio(slow, fast).blocks == (2.0, 2.0, 2.0)
    with pytest.raises(ValueError):
        paired_ratio(slow, Timing((1.0,)))
