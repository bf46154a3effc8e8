"""Networks are read once and left alone; what cannot be read is refused with what to pass instead."""

from __future__ import annotations

import copy
import logging
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from topologies import GROUPED, TOPOLOGIES, Chain, conv, pooled
from torch import Tensor, nn

import softprune as sp
from softprune.cut.verify import outputs_of
from softprune.errors import ModelError
from softprune.graph import Example, trace
from softprune.graph.reader import record

IMAGE = torch.randn(2, 3, 8, 8)


def operators(nodes: Any) -> list[tuple[str, int, Any]]:
    """Name, number of inputs and shape of every operator."""
    return [
        (str(node.target), len(node.all_input_nodes), tuple(node.meta["val"].shape))
        for node in nodes
        if node.op == "call_function" and isinstance(node.meta["val"], Tensor)
    ]


@pytest.mark.parametrize("name", ["shuffle", "two inputs"])
def test_the_operators_are_those_of_torch_export(name: str) -> None:
    topology = {**TOPOLOGIES, **GROUPED}[name]
    model, example = topology.build().eval(), Example.of(topology.example())
    nodes = record(model, example)
    program = torch.export.export(model, example.args, example.kwargs)
    assert operators(nodes) == operators(program.graph.nodes)
    read = {node.meta["tensor"] for node in nodes if "tensor" in node.meta}
    assert read == {name for name, _ in (*model.named_parameters(), *model.named_buffers())}


class Constants(nn.Module):
    """A tensor that is no buffer, one that forward() makes, an in-place sum, and pieces of which one is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.fc = conv(3, 8), nn.BatchNorm2d(8), nn.Linear(8, 5)
        self.scale = (torch.tensor(2.0),)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.conv(x)))
        left, _, _ = torch.cat([x, x, x]).chunk(3)
        left += torch.tensor([1.0])
        return self.fc(pooled(left * self.scale[0] + torch.zeros_like(left)))


def test_constants_in_place_operators_and_unused_pieces() -> None:
    nodes = record(Constants().eval(), Example.of(IMAGE))
    assert sum("made" in node.meta for node in nodes) == 2
    by_name = {str(node.target): node for node in nodes}
    assert by_name["aten.mul.Tensor"].args[0] is by_name["aten.add_.Tensor"]
    assert by_name["aten.zeros_like.default"].users
    assert str(nodes).count("getitem") == 1


class Called(nn.Module):
    """One module twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Chain()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x), self.inner(x)


def test_calls_of_one_module() -> None:
    nodes = record(Called().eval(), Example.of(IMAGE))
    convolutions = [node for node in nodes if str(node.target) == "aten.conv2d.default"]
    keys, names = zip(*(node.meta["calls"][-1] for node in convolutions), strict=True)
    assert names == ("inner.conv1", "inner.conv2") * 2
    assert len(set(keys)) == 4


class ReadsConstants(Chain):
    """Reads the values of a tensor that is a plain attribute, as the anchors of detection networks are made."""

    def __init__(self) -> None:
        super().__init__()
        self.strides = torch.tensor([2.0, 4.0])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (self.strides / 2)[1].item()


class WritesConstants(Chain):
    """Writes into a tensor that it computes from a plain attribute, and into a view of the attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.counts * 1
        chosen[0] = 2
        self.counts[:2].add_(1)
        noise = torch.rand_like(self.counts)
        return super().forward(x) + chosen[0].item() + noise.sum()


@pytest.mark.parametrize("build", [ReadsConstants, WritesConstants])
def test_values_of_constants_are_known_and_stay(build: type[Chain]) -> None:
    model, plain = build().eval(), Chain()
    before, state = copy.deepcopy(model.__dict__), torch.get_rng_state()
    nodes = record(model, Example.of(IMAGE))
    assert next(node.args[1] for node in nodes if str(node.target) == "aten.add.Tensor") == 2.0
    assert sp.cost(model, IMAGE).macs == sp.cost(plain, IMAGE).macs
    assert all(torch.equal(value, before[name]) for name, value in model.__dict__.items() if isinstance(value, Tensor))
    assert torch.equal(state, torch.get_rng_state())


class Stateful(Chain):
    """Stores a feature map on itself."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.relu(x)
        return super().forward(self.seen)


@pytest.mark.parametrize("build", [Chain, Stateful])
def test_a_network_is_left_as_it_was(build: type[Chain]) -> None:
    model = build().train()
    before, state = (copy.deepcopy(model.state_dict()), {name: dict(m.__dict__) for name, m in model.named_modules()})
    trace(model, IMAGE)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    for name, module in model.named_modules():
        assert state[name] == module.__dict__
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


class Deep(nn.Module):
    """A pre-activation network of any depth that counts how often it runs."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.stem, self.fc = conv(3, 8), nn.Linear(8, 5)
        self.norms = nn.ModuleList([nn.BatchNorm2d(8) for _ in range(depth)])
        self.convs = nn.ModuleList([conv(8, 8) for _ in range(depth)])
        self.runs: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.runs.append(type(x) is Tensor)
        x = self.stem(x)
        for norm, layer in zip(self.norms, self.convs, strict=True):
            x = x + layer(F.relu(norm(x)))
        return self.fc(pooled(x))

    def __deepcopy__(self, memo: dict[int, Any]) -> Deep:
        twin = Deep(len(self.norms)).to(self.fc.weight.dtype)
        twin.load_state_dict(self.state_dict())
        twin.runs = self.runs
        self.runs.append(False)
        return twin.train(self.training)


def test_inspect_runs_a_network_a_fixed_number_of_times() -> None:
    model = Deep(2)
    sp.inspect(model, IMAGE)
    assert sum(model.runs) <= 12  # masked and cut networks
    assert len(model.runs) - sum(model.runs) <= 6  # three recordings, and copies


def test_networks_are_read_in_several_threads_at_once() -> None:
    before = sys.stderr, list(warnings.filters)
    chain = TOPOLOGIES["chain"]
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda _: sp.inspect(chain.build(), chain.example()), range(8))]
    assert {each.macs for each in found} == {found[0].macs}
    assert (sys.stderr, list(warnings.filters)) == before


# --- what a network may return, and what is refused ----------------------------------------------------------------


@dataclass
class Found:
    logits: Tensor
    note: Any = None


class Returning(Chain):
    """A network whose logits are returned in an object."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        return "chain", self.kind(logits=super().forward(x))


@pytest.mark.parametrize("kind", [Found, type("Dict", (dict,), {})])
def test_outputs_in_dataclasses_and_other_dicts_are_read_and_compared(kind: Any) -> None:
    torch.manual_seed(0)
    model = Returning(kind)
    pruner = sp.SoftPruner(model, IMAGE)
    with torch.no_grad():
        model.bn1.weight[:4], model.bn1.bias[:4] = 0.1, -3.0
    compact = pruner.compact()
    assert compact.conv1.out_channels == 4  # type: ignore[union-attr]
    masked, cut = (outputs_of(each.eval(), Example.of(IMAGE)) for each in (model, compact))
    assert len(masked) == 1
    assert torch.allclose(masked[0], cut[0], atol=1e-6)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.bn(x)) if x.sum() > 0 else x


class InPlaceShape(Chain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.relu(x).unsqueeze(0).squeeze_(0))


class Quantised(Branching):
    """A change to integers stands in every statically quantised network."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.ao.nn.quantized.Quantize(0.1, 0, torch.quint8)


class Ddp(nn.parallel.DistributedDataParallel):
    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


def exported() -> Any:
    return torch.export.export(Chain().eval(), (IMAGE,)).module()


@pytest.mark.parametrize(
    ("build", "example", "says"),
    [
        (lambda: lambda x: x, IMAGE, "Got function"),
        (lambda: nn.DataParallel(Chain()), IMAGE, r"pass model\.module,"),
        (lambda: Ddp(Chain()), IMAGE, r"pass model\.module,"),
        (lambda: torch.compile(Chain(), backend="eager"), IMAGE, r"pass model\._orig_mod,"),
        (Chain, {"x": IMAGE}, r"Got dict.*for keywords, or \(batch,\)"),
        (Chain, (2, 3, 9, 9), r"Got no tensor among \(2, 3, 9, 9\)"),
        (Chain, torch.randn(2, 4, 8, 8), r"\(2, 4, 8, 8\).*expected input.* to have 3 channels"),
        (Branching, IMAGE, r"Branching raised at .*test_reader\.py:\d+, `return torch\.relu"),
        (InPlaceShape, IMAGE, "shape in place"),
        (lambda: Returning(SimpleNamespace), IMAGE, "Got SimpleNamespace; wrap"),
        (lambda: torch.jit.trace(Chain().eval(), IMAGE), IMAGE, "pass the network that was converted"),
        (exported, IMAGE, "pass the network that was converted"),
        (Quantised, IMAGE, "pass the network that was converted"),
        (lambda: nn.Sequential(Chain(), torch.ao.quantization.FakeQuantize()), IMAGE, "prune first, then prepare"),
    ],
)
def test_what_cannot_be_read_is_refused_with_what_to_pass(
    build: Callable[[], Any], example: Any, says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    before = logging.root.manager.disable, list(warnings.filters)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build()
    with pytest.raises(ModelError, match=says):
        sp.inspect(model, example)
    assert capfd.readouterr() == ("", "")
    assert (logging.root.manager.disable, list(warnings.filters)) == before


class Sized(Chain):
    """Another forward pass for large images."""

    def __init__(self, threshold: int) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 1 if x.shape[-1] > self.threshold else x)


@pytest.mark.parametrize(("threshold", "found"), [(4, True), (15, True), (16, False), (3, False)])
def test_a_forward_pass_that_depends_on_the_size_is_named(
    threshold: int, found: bool, caplog: pytest.LogCaptureFixture
) -> None:
    report = sp.inspect(Sized(threshold), IMAGE)
    assert ("aten.add" in report.size_dependence) == ("depends on the input size" in str(report)) == found
    assert ("depend on the input size" in caplog.text) == found
