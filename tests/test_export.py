"""ONNX files compute what the network computes, are written whole or not at all; folding is exact where it happens."""

import collections
import copy
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from export_networks import Dense, Residual, compacted, randomise_
from torch import Tensor, nn

from softprune import SoftPruner, export, models
from softprune.cut import plans_of, save
from softprune.errors import ConfigError, ModelError, PlanError, VerificationError
from softprune.export import fold_batch_norms, to_onnx
from softprune.graph import Select

onnx = pytest.importorskip("onnx", reason='the "onnx" extra is not installed')
onnxruntime = pytest.importorskip("onnxruntime", reason='the "onnx" extra is not installed')
pytest.importorskip("onnxscript", reason='the "onnx" extra is not installed')


# An export takes seconds: each file is made once, and looked at for all that its network shows.


@pytest.mark.parametrize("name", ["residual", "dense"])
def test_runs_in_onnx_runtime_at_other_batch_sizes(name: str, tmp_path: Path) -> None:
    _, compact, example = compacted(name)
    report = to_onnx(compact, example, tmp_path / "small.onnx")
    assert report.bytes == (tmp_path / "small.onnx").stat().st_size
    assert report.max_difference <= 1e-4 * report.scale
    assert any(shape.startswith("5x") for shape in report.inputs)
    session = onnxruntime.InferenceSession(str(report.path), providers=["CPUExecutionProvider"])
    batch = torch.randn(7, *example.shape[1:])
    outputs = session.run(None, {session.get_inputs()[0].name: batch.numpy()})
    with torch.no_grad():
        expected = compact(batch)
    expected = list(expected.values()) if isinstance(expected, dict) else [expected]
    for got, wanted in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(got, wanted.numpy(), rtol=1e-4, atol=1e-5)
    graph = onnx.load(report.path).graph
    if name == "dense":
        assert_an_index_is_one_gather_of_a_constant(compact, graph)


def assert_an_index_is_one_gather_of_a_constant(compact: nn.Module, graph: Any) -> None:
    selects = sum(isinstance(module, Select) for module in compact.modules())
    assert selects
    counts = collections.Counter(node.op_type for node in graph.node)
    assert counts["Gather"] == selects
    constants = {entry.name for entry in graph.initializer}
    assert all(node.input[1] in constants for node in graph.node if node.op_type == "Gather")
    assert not counts.keys() & {"GatherElements", "GatherND", "ScatterND", "Expand"}


def test_folding_removes_batch_norms_from_the_file_and_leaves_the_network_alone(tmp_path: Path) -> None:
    _, compact, example = compacted("dense")
    compact.train()
    before = {name: tensor.clone() for name, tensor in compact.state_dict().items()}
    report = to_onnx(compact, example, tmp_path / "small.onnx", fold_bn=True)
    assert report.folded > 0
    assert "BatchNorms folded" in str(report)
    assert compact.training
    assert plans_of(compact)
    assert all(torch.equal(before[name], tensor) for name, tensor in compact.state_dict().items())


def test_a_file_that_differs_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(export.TOLERANCES, torch.float32, 0.0)
    _, compact, example = compacted("residual")
    target = tmp_path / "small.onnx"
    target.write_bytes(b"an earlier file")
    with pytest.raises(VerificationError, match=r"must have the outputs of the network.*Got a difference"):
        to_onnx(compact, example, target)
    assert [path.name for path in tmp_path.iterdir()] == ["small.onnx"]
    assert target.read_bytes() == b"an earlier file"


def test_errors_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, example = models.build("digits_net", 10), torch.randn(2, 1, 8, 8)
    with pytest.raises(ConfigError, match=r"must end in \.onnx"):
        to_onnx(model, example, tmp_path / "small.bin")
    pruner = SoftPruner(model, example)
    with pytest.raises(ModelError, match=r"pruner\.compact\(\)"):
        to_onnx(model, example, tmp_path / "small.onnx")
    pruner.detach()
    with pytest.raises(ModelError, match="dynamic_batch=False"):
        to_onnx(model, (torch.randn(2, 1, 8, 8), torch.randn(3)), tmp_path / "small.onnx")

    def missing(name: str) -> object:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"pip install onnx onnxscript onnxruntime"):
        to_onnx(model, example, tmp_path / "small.onnx")


class Unknown(nn.Module):
    """An operator that ONNX does not have."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.eigvals(x @ x.T).real


class Fixed(nn.Module):
    """Another network at a batch of two, which the exporter fixes without a word."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.shape[0] == 2 else 2 * x


def test_what_the_exporter_stumbled_over_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"aten\.linalg_eig") as refusal:
        to_onnx(Unknown(), torch.randn(2, 8), tmp_path / "small.onnx")
    assert "\x1b" not in str(refusal.value)


class Labelled(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"y": 2 * x, "none": None, "label": 3}


def test_outputs_that_are_no_tensors_are_said(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"Got int from Labelled"):
        to_onnx(Labelled(), torch.randn(2, 3), tmp_path / "net.onnx")


def test_a_fixed_batch_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="dynamic_batch=False"):
        to_onnx(Fixed(), torch.randn(2, 8), tmp_path / "small.onnx")
    assert not (tmp_path / "small.onnx").exists()
    to_onnx(Fixed(), torch.randn(2, 8), tmp_path / "small.onnx", dynamic_batch=False)


@pytest.mark.parametrize(("width", "says"), [(9, True), (16, False)])
def test_depthwise_widths_without_a_fast_kernel_are_said(
    width: int, says: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    network = nn.Sequential(nn.Conv2d(3, width, 1), nn.Conv2d(width, width, 3, groups=width), nn.Conv2d(width, 16, 1))
    to_onnx(network, torch.randn(2, 3, 8, 8), tmp_path / "network.onnx")
    assert ("(1 of them depthwise) have numbers of channels that are not multiples of 8" in caplog.text) is says


# --- folding ---------------------------------------------------------------------------------------------------


def _norms(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


def _assert_same(left: nn.Module, right: nn.Module, example: Tensor) -> None:
    left, right = copy.deepcopy(left).eval().double(), copy.deepcopy(right).eval().double()
    with torch.no_grad():
        torch.testing.assert_close(left(example.double()), right(example.double()), rtol=1e-5, atol=1e-6)


def _listed() -> nn.Module:
    model = Residual()
    model._modules = {"listed": nn.ModuleList([model.norm]), **model._modules}  # its first name is not that of its call
    return model


@pytest.mark.parametrize(("make", "left"), [(_listed, []), (Dense, ["bn1", "bn2"])], ids=["all kinds", "shared stream"])
def test_layers_are_folded_where_they_have_one_reader(make: Callable[[], nn.Module], left: list[str]) -> None:
    model, example = make(), torch.randn(2, 3, 8, 8)
    randomise_(model, dead=0)
    folded = fold_batch_norms(model, example)
    assert _norms(folded) == left
    assert not folded.training
    _assert_same(model, folded, example)
    assert len(_norms(model)) == 3


@pytest.mark.parametrize("name", ["residual", "dense"])
def test_compact_networks_fold(name: str, tmp_path) -> None:
    _, compact, example = compacted(name)
    folded = fold_batch_norms(compact, example)
    assert len(_norms(folded)) < len(_norms(compact))
    _assert_same(compact, folded, example)
    assert plans_of(compact)
    with pytest.raises(PlanError, match="without a plan"):
        save(folded, tmp_path / "folded")


class Shared(nn.Module):
    """What must stay: layers and BatchNorms called twice, weights that forward() reads, batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.conv, self.norm2 = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.read, self.norm3 = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.plain, self.norm4 = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, track_running_stats=False)
        self.last, self.norm5 = nn.Conv2d(3, 3, 1, bias=False), nn.BatchNorm2d(3, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.twice(x)) + self.twice(x)
        x = self.norm2(self.norm2(self.conv(x)))
        x = self.norm3(self.read(x)) + self.norm3.weight.sum() + self.read.weight.sum()
        x = self.norm4(self.plain(x))
        return F.relu(self.norm5(self.last(x)))


def test_what_is_shared_or_depends_on_the_batch_stays() -> None:
    model, example = Shared().eval(), torch.randn(2, 3, 5, 5)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None:
            module.running_mean.normal_()
    folded = fold_batch_norms(model, example)
    assert _norms(folded) == ["norm", "norm2", "norm3", "norm4"]
    _assert_same(model, folded, example)


def test_timm_norms_keep_their_activation() -> None:
    timm = pytest.importorskip("timm", reason='the "timm" extra is not installed')
    torch.manual_seed(0)
    model = timm.create_model("mobilenetv3_small_050").eval()
    randomise_(model, dead=0)
    example = torch.randn(2, 3, 64, 64)
    folded = fold_batch_norms(model, example)
    assert _norms(folded) == []
    _assert_same(model, folded, example)


@pytest.mark.parametrize("kind", ["volumes", "transposed linear", "transposed sequence"])
def test_weights_keep_their_memory_order(kind: str) -> None:
    torch.manual_seed(0)
    if kind == "volumes":
        model, example = nn.Sequential(nn.Conv3d(3, 8, 3), nn.BatchNorm3d(8)), torch.randn(2, 3, 6, 6, 6)
        model.to(memory_format=torch.channels_last_3d)
    elif kind == "transposed linear":
        model, example = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)), torch.randn(4, 6)
        model[0].weight = nn.Parameter(torch.randn(6, 8).t())
    else:
        model, example = nn.Sequential(nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8)), torch.randn(2, 3, 9)
        model[0].weight = nn.Parameter(torch.randn(3, 3, 8).permute(2, 1, 0))
    randomise_(model.eval(), dead=0)
    folded = fold_batch_norms(model, example)
    assert _norms(folded) == []
    assert folded[0].weight.stride() == model[0].weight.stride()
    _assert_same(model, folded, example)


class _WithoutBias(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return F.conv2d(input, self.weight, None, self.stride, self.padding)


def test_a_layer_that_leaves_its_bias_out_keeps_its_norm() -> None:
    torch.manual_seed(0)
    odd = nn.Sequential(_WithoutBias(3, 8, 3, bias=False), nn.BatchNorm2d(8))
    model = nn.Sequential(odd, nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)).eval()
    randomise_(model, dead=0)
    example = torch.randn(2, 3, 16, 16)
    folded = fold_batch_norms(model, example)
    assert _norms(folded) == ["0.1"]
    _assert_same(model, folded, example)
