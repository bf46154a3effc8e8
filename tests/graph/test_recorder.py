"""The recorder gives the operators that torch.export gives, leaves the network alone, and reads it once."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from topologies import GROUPED, TOPOLOGIES, Chain, conv, pooled
from torch import Tensor, nn

import softprune as sp
from softprune.errors import ModelError
from softprune.graph import Example, capture, trace
from softprune.graph.recorder import record

IMAGE = torch.randn(2, 3, 8, 8)


def operators(nodes: Any) -> list[tuple[str, int, Any]]:
    found = []
    for node in nodes:
        value = node.meta.get("val")
        if node.op == "call_function":
            shape = tuple(value.shape) if isinstance(value, Tensor) else None
            found.append((str(node.target), len(node.all_input_nodes), shape))
    return found


@pytest.mark.parametrize("name", ["option-A", "shuffle", "tied", "transposed", "two inputs"])
def test_the_operators_are_those_of_torch_export(name: str) -> None:
    topology = {**TOPOLOGIES, **GROUPED}[name]
    model, example = topology.build().eval(), Example.of(topology.example())
    nodes, parameters = record(model, example)
    program = capture._export(model, example)
    assert operators(nodes) == operators(program.graph.nodes)
    assert set(parameters.values()) == {name for name, _ in (*model.named_parameters(), *model.named_buffers())}


class Stateful(Chain):
    """Stores a feature map on itself."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.relu(x)
        return super().forward(self.seen)


class Wrapped(Chain):
    def forward(self, x: Tensor) -> Any:
        return [super().forward(x), object()]


class InPlaceShape(Chain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.relu(x).unsqueeze(0).squeeze_(0))


@pytest.mark.parametrize("build", [Stateful, Wrapped, InPlaceShape])
def test_what_it_cannot_record_is_refused(build: type[nn.Module]) -> None:
    model = build().eval()
    before = dict(model.__dict__)
    with pytest.raises(ModelError):
        record(model, Example.of(IMAGE))
    assert model.__dict__.keys() == before.keys()


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
    nodes, parameters = record(Constants().eval(), Example.of(IMAGE))
    assert sum(name.startswith("constant") for name in parameters.values()) == 2
    by_name = {str(node.target): node for node in nodes}
    assert by_name["aten.mul.Tensor"].args[0] is by_name["aten.add_.Tensor"]
    assert by_name["aten.zeros_like.default"].users
    assert str(nodes).count("getitem") == 1
    (frozen,) = sp.inspect(Constants(), IMAGE).frozen
    assert frozen.reason == "no channel can be removed: dead ones are not zero where they are read"


class Repeated(nn.Module):
    """The same operators on tensors of the same shapes: new outputs, in place, views, constants."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (x + 1).transpose_(2, 3)
        left, right = x + 1, x + 1
        left, right = left.relu_(), right.relu_()
        rows = left.flatten(1), right.flatten(1)
        size = int(torch.tensor([2, 3]).sum()), int(torch.tensor([4, 3]).sum())
        return left - right, rows[0] - rows[1], left.flatten()[: size[0]].sum() + left.flatten()[: size[1]].sum()


def test_repeated_operators_have_outputs_of_their_own() -> None:
    nodes, _ = record(Repeated().eval(), Example.of(IMAGE))

    def named(operator: str) -> list[Any]:
        return [node for node in nodes if str(node.target) == f"aten.{operator}"]

    (_, *added), activated, differences = named("add.Tensor"), named("relu_.default"), named("sub.Tensor")
    assert all(node.meta["val"].is_contiguous() for node in added)
    assert [node.args[0] for node in activated] == added[:2]
    assert added[0].meta["val"] is not added[1].meta["val"]
    assert [node.meta["val"] for node in activated] == [node.meta["val"] for node in added[:2]]
    assert list(differences[0].args) == activated
    assert [node.args[0] for node in named("flatten.using_ints")[:2]] == activated
    assert list(differences[1].args) == named("flatten.using_ints")[:2]
    assert [node.args[3] for node in named("slice.Tensor")] == [5, 7]


class Called(nn.Module):
    """One module twice, by a literal line, so that calls and lines can be told apart."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Chain()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x), self.inner(x)


def test_calls_of_one_module_and_lines_of_the_source() -> None:
    nodes, _ = record(Called().eval(), Example.of(IMAGE))
    convolutions = [node for node in nodes if str(node.target) == "aten.conv2d.default"]
    stacks = [list(node.meta["nn_module_stack"].items()) for node in convolutions]
    names = [stack[-1][1][0] for stack in stacks]
    assert names[: len(names) // 2] == names[len(names) // 2 :]
    assert len({stack[-1][0] for stack in stacks}) == len(stacks)
    assert all(node.meta["stack_trace"].split(":")[0].endswith(".py") for node in convolutions)
    assert all(__file__ in node.meta["stack_trace"] for node in convolutions)


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


def test_inspect_and_compact_run_a_network_a_fixed_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.export, "export", None)
    model = Deep(2)
    sp.inspect(model, IMAGE)
    assert sum(model.runs) <= 12  # four masked networks, one of them twice, beside four cuts; three in training mode
    assert len(model.runs) - sum(model.runs) <= 4  # one recording and three copies
    pruner = sp.SoftPruner(model, IMAGE)
    with torch.no_grad():
        model.norms[0].bias[:4] = -9.0
    model.runs.clear()
    pruner.compact()
    assert sum(model.runs) <= 4
    assert len(model.runs) - sum(model.runs) <= 3


def python_calls(model: nn.Module) -> int:
    count = 0

    def step(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(step)
    try:
        sp.inspect(model, IMAGE)
    finally:
        sys.setprofile(None)
    return count


def test_the_work_grows_linearly_with_depth() -> None:
    sp.inspect(Deep(2), IMAGE)
    short, middle, long = (python_calls(Deep(depth)) for depth in (4, 12, 28))
    assert long - middle < 2.2 * (middle - short)


def test_the_recorded_network_is_left_as_it_was() -> None:
    model = Chain().train()
    before, state = (copy.deepcopy(model.state_dict()), {name: dict(m.__dict__) for name, m in model.named_modules()})
    trace(model, IMAGE)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    for name, module in model.named_modules():
        assert state[name] == module.__dict__
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_what_forward_stores_does_not_stay_on_a_network_that_is_exported() -> None:
    """The recorder refuses it; torch.export takes it, but would leave a tensor without data."""
    model = Stateful()
    trace(model, IMAGE)
    assert not hasattr(model, "seen")


class ReadsConstants(Chain):
    """Reads the values of a tensor that is a plain attribute, as the anchors of detection networks are made."""

    def __init__(self) -> None:
        super().__init__()
        self.strides = torch.tensor([2.0, 4.0])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (self.strides / 2)[1].item()


def test_values_of_constants_can_be_read() -> None:
    model = ReadsConstants().eval()
    nodes, _ = record(model, Example.of(IMAGE))
    (added,) = [node for node in nodes if str(node.target) == "aten.add.Tensor"]
    assert added.args[1] == 2.0
    assert sp.cost(model, IMAGE).macs == sp.cost(Chain(), IMAGE).macs
    assert type(model.strides) is Tensor


class WritesConstants(Chain):
    """Writes into a tensor that it computes from a plain attribute, and into a view of the attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.counts * 1
        chosen[0] = 5
        self.counts[:2].add_(1)
        noise = torch.rand_like(self.counts)
        return super().forward(x) + chosen[0].item() + noise.sum()


def test_writes_into_constants_are_seen_and_change_no_tensor_of_the_model() -> None:
    model, plain = WritesConstants().eval(), Chain()
    state = torch.get_rng_state()
    nodes, _ = record(model, Example.of(IMAGE))
    assert next(node.args[1] for node in nodes if str(node.target) == "aten.add.Tensor") == 5.0
    assert sp.cost(model, IMAGE).macs == sp.cost(plain, IMAGE).macs
    assert model.counts.tolist() == [0, 0, 0]
    assert torch.equal(state, torch.get_rng_state())
