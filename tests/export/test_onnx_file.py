"""ONNX files compute what the compact network computes, at any batch size, and are written whole or not at all."""

import collections
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from export_networks import compacted
from torch import Tensor, nn

from softprune import SoftPruner, models
from softprune.cut import plans_of
from softprune.errors import ConfigError, ModelError, VerificationError
from softprune.export import to_onnx
from softprune.graph import ConstantOutput, Select

onnx = pytest.importorskip("onnx", reason='the "onnx" extra is not installed')
onnxruntime = pytest.importorskip("onnxruntime", reason='the "onnx" extra is not installed')
pytest.importorskip("onnxscript", reason='the "onnx" extra is not installed')


# An export takes seconds: each file is made once, and looked at for all that its network shows.


@pytest.mark.parametrize("name", ["residual", "void", "dense", "digits_net"])
def test_runs_in_onnx_runtime_at_other_batch_sizes(name: str, tmp_path: Path) -> None:
    dense, compact, example = compacted(name)
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
    if name == "void":  # a dead branch computes no convolution
        assert any(isinstance(module, ConstantOutput) for module in compact.modules())
        assert sum(node.op_type == "Conv" for node in graph.node) == 1
    if name == "digits_net":
        assert report.bytes < 0.8 * to_onnx(dense.eval(), example, tmp_path / "dense.onnx").bytes


def assert_an_index_is_one_gather_of_a_constant(compact: nn.Module, graph: Any) -> None:
    selects = sum(isinstance(module, Select) for module in compact.modules())
    assert selects
    counts = collections.Counter(node.op_type for node in graph.node)
    assert counts["Gather"] == selects
    constants = {entry.name for entry in graph.initializer}
    assert all(node.input[1] in constants for node in graph.node if node.op_type == "Gather")
    assert not counts.keys() & {"GatherElements", "GatherND", "ScatterND", "Expand"}


@pytest.mark.parametrize("name", ["residual", "dense"])
def test_folding_removes_batch_norms_from_the_file_and_leaves_the_network_alone(name: str, tmp_path: Path) -> None:
    _, compact, example = compacted(name)
    compact.train()
    before = {name: tensor.clone() for name, tensor in compact.state_dict().items()}
    report = to_onnx(compact, example, tmp_path / "small.onnx", fold_bn=True)
    assert report.folded > 0
    assert "BatchNorms folded" in str(report)
    assert compact.training
    assert plans_of(compact)
    assert all(torch.equal(before[name], tensor) for name, tensor in compact.state_dict().items())


def test_an_argument_may_be_a_dict(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def forward(self, batch: dict[str, Tensor]) -> dict[str, list[Tensor]]:
            return {"scaled": [batch["x"] * batch["scale"]]}

    example = ({"x": torch.randn(2, 3), "scale": torch.randn(2, 1)},)
    assert "5x3, 5x1" in to_onnx(Scaled(), example, tmp_path / "small.onnx").inputs


def test_a_file_that_differs_is_not_kept(tmp_path: Path) -> None:
    _, compact, example = compacted("residual")
    target = tmp_path / "small.onnx"
    target.write_bytes(b"an earlier file")
    with pytest.raises(VerificationError, match=r"must compute what the network computes.*Got a difference"):
        to_onnx(compact, example, target, tolerance=0.0)
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
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"pip install onnx onnxscript onnxruntime"):
        to_onnx(model, example, tmp_path / "small.onnx")


class Unknown(nn.Module):
    """An operator that ONNX does not have."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.eigvals(x @ x.T).real


class Lookup(nn.Module):
    """A mistake of its own, which is no matter of shapes."""

    def forward(self, x: Tensor) -> Tensor:
        return {"dynamic": x}["static"]


class Fixed(nn.Module):
    """Another network at a batch of two, which the exporter fixes without a word."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.shape[0] == 2 else 2 * x


@pytest.mark.parametrize(("network", "cause"), [(Unknown, "aten.linalg_eig"), (Lookup, "KeyError .*'static'")])
def test_what_the_exporter_stumbled_over_is_said(network: type[nn.Module], cause: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=cause) as refusal:
        to_onnx(network(), torch.randn(2, 8), tmp_path / "small.onnx")
    assert "\x1b" not in str(refusal.value)
    assert "dynamic_batch" not in str(refusal.value)


@pytest.mark.parametrize("other", [lambda x: 3, lambda x: "logits", lambda x: len(x)])
def test_outputs_that_are_no_tensors_are_said(other: Callable[[Tensor], object], tmp_path: Path) -> None:
    network = type(
        "Labelled", (nn.Module,), {"forward": lambda self, x: {"y": 2 * x, "none": None, "other": other(x)}}
    )()
    with pytest.raises(
        ModelError, match=r"has tensors as outputs\. Got (int|str) among those of Labelled; export a module"
    ):
        to_onnx(network, torch.randn(2, 3), tmp_path / "net.onnx")


def test_a_fixed_batch_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"on input 1x8: .*dynamic_batch=False"):
        to_onnx(Fixed(), torch.randn(2, 8), tmp_path / "small.onnx")
    assert not (tmp_path / "small.onnx").exists()
    to_onnx(Fixed(), torch.randn(2, 8), tmp_path / "small.onnx", dynamic_batch=False)


def test_what_the_runtime_does_not_take_is_said_and_nothing_is_written(tmp_path: Path) -> None:
    _, compact, example = compacted("residual")
    with pytest.raises(ModelError, match=r"must accept the network\. Got .*bfloat16"):
        to_onnx(compact.bfloat16(), example.bfloat16(), tmp_path / "small.onnx")
    assert list(tmp_path.iterdir()) == []
