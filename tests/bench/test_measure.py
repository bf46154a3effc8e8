"""Dense against compact: every backend is measured as asked, and nothing is left changed."""

import copy
import functools
import gc
import json
import weakref
from types import SimpleNamespace

import pytest
import torch
from export_networks import Dense, compacted

from softprune.bench import BACKENDS, backends, compare_latency
from softprune.bench.backends import Setting, _compile
from softprune.devices import Call
from softprune.errors import ConfigError
from softprune.export.folding import count_batch_norms
from softprune.graph import Example


def _setting(device: str, *, channels_last: bool = False, compile_mode: str = "") -> Setting:
    return Setting(
        device=torch.device(device),
        dtype=torch.float32,
        threads=1,
        channels_last=channels_last,
        compile_mode=compile_mode,
        fold_bn=False,
        repeats=1,
    )


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
        assert row.dense is not None
        assert len(row.dense.blocks) == 3
        assert row.mac_ratio == report.dense_macs / report.compact_macs
        assert row.realised == pytest.approx(row.speed_up / row.mac_ratio)
        low, high = row.speed_up_spread
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
    inputs = []

    def ready(example: Example) -> Call:
        given = example.map(torch.clone)
        inputs.append(weakref.ref(given.args[0]))
        return lambda: given

    monkeypatch.setattr(backends, "eager", lambda *_: ready)
    monkeypatch.setattr(backends, "capture_graph", lambda *_, **__: SimpleNamespace(replay=lambda: None))
    setting = _setting("cuda")
    example = Example.of(torch.zeros(2, 3))
    replay = BACKENDS["graph"](Dense(), example, setting)(example)
    replay()
    gc.collect()
    assert inputs[0]() is not None


def test_the_mode_of_the_compiler_is_used_and_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []

    def compile(model, *, dynamic, mode):
        modes.append(mode)
        return model

    monkeypatch.setattr(torch, "compile", compile)
    model = Dense().eval()
    options = {"backends": ("eager", "compile"), "compile_mode": "reduce-overhead", "repeats": 1}
    rows = compare_latency(model, model, torch.randn(1, 3, 8, 8), channels_last=True, **options).rows
    assert modes == ["reduce-overhead", "reduce-overhead"]
    assert [row.compile_mode for row in rows] == ["", "reduce-overhead"]
    assert all(row.to_dict()["channels_last"] for row in rows)


def test_the_compiler_keeps_the_memory_order_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(torch, "compile", lambda model, **options: seen.append(options))
    for device, channels_last in (("cuda", False), ("cuda", True), ("cpu", False)):
        _compile(Dense(), _setting(device, channels_last=channels_last, compile_mode="reduce-overhead"))
    first, *others = seen
    assert first["options"] == {"triton.cudagraphs": True, "layout_optimization": False}
    assert others == [{"dynamic": False, "mode": "reduce-overhead"}] * 2


def test_both_networks_are_folded_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    dense, compact, example = compacted("residual")
    timed = []
    eager = BACKENDS["eager"]
    monkeypatch.setitem(BACKENDS, "eager", lambda model, *rest: timed.append(model) or eager(model, *rest))
    (plain,) = compare_latency(dense, compact, example, repeats=1).rows
    (row,) = compare_latency(dense, compact, example, repeats=1, fold_bn=True).rows
    assert not plain.fold_bn
    assert row.to_dict()["fold_bn"]
    assert row.mac_ratio == plain.mac_ratio
    before, folded = timed[:2], timed[2:]
    assert before == [dense, compact]
    for was, model in zip(before, folded, strict=True):
        assert count_batch_norms(model) < count_batch_norms(was)
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
        ({"backends": ("tensorrt",)}, "A backend must be one of eager, graph, compile, onnxruntime"),
        ({"dtype": "int8"}, "`dtype` must be one of"),
        ({"compile_mode": "fast"}, "`compile_mode` must be one of"),
        ({"repeats": 0}, "an integer of at least 1. Got 0"),
        ({"repeats": 1.5}, "`repeats` must be an integer. Got 1.5"),
        ({"threads": -1}, "`threads` must be an integer"),
        ({"device": "abacus"}, "`device` must be available in PyTorch.*abacus"),
        ({"batches": []}, "`batches` must be integers"),
    ],
)
def test_mistakes(options: dict[str, object], message: str) -> None:
    model = Dense().eval()
    with pytest.raises(ConfigError, match=message):
        compare_latency(model, model, torch.randn(1, 3, 8, 8), **options)  # type: ignore[arg-type]


class _ForFour(torch.nn.Module):
    """Takes four images at a time, in single precision."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x.float())).view(4, 144)


def test_a_network_for_one_batch_size_and_precision_alone() -> None:
    model, example = _ForFour().eval(), torch.randn(4, 3, 8, 8)
    report = compare_latency(model, model, example, backends="eager", batches=4, fold_bn=True, repeats=1)  # type: ignore[arg-type]
    assert report.rows[0].speed_up is not None
    assert report.dense_macs == 4 * 27 * 36
    first, second = compare_latency(model, model, example, batches=[4, 8], repeats=1).rows
    assert first.speed_up is not None
    assert second.speed_up is None
    assert second.note.startswith("does not run: RuntimeError: shape '[4, 144]' is invalid")
    (half,) = compare_latency(model, model, example, batches=[4], dtype="float64", repeats=1).rows
    assert "does not run: RuntimeError" in half.note
