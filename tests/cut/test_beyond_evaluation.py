"""What one call in evaluation does not show: code that training alone runs, heads for other calls, a second cut."""

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from topologies import randomise_
from torch import Tensor, nn

import softprune as sp
from softprune.cut.apply import duplicated
from softprune.cut.selection import read_graph
from softprune.errors import ModelError

IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def _unit(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


def _halved(model: nn.Module, **options: object) -> tuple[sp.SoftPruner, nn.Module]:
    """A pruner, and the cut of every other channel of its sites."""
    pruner = sp.SoftPruner(model, IMAGE, **options)  # type: ignore[arg-type]
    with torch.no_grad():
        for site in pruner.sites:
            bn = model.get_submodule(site.name)
            bn.bias[::2], bn.weight[::2] = -9.0, 0.01
    model.eval()
    return pruner, pruner.compact()


class InTraining(nn.Module):
    """Training follows the features with a buffer, or hands an inner layer out."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second, self.head = _unit(3, 8), _unit(8, 8), nn.Linear(8, 3)
        self.register_buffer("centre", torch.zeros(8))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        inner = self.first(x)
        features = self.second(inner).mean((2, 3))
        y = self.head(F.dropout(features, training=self.training))
        if not self.training:
            return y
        if self.kind == "centre":
            with torch.no_grad():
                self.centre.lerp_(features.mean(0), 0.1)
            return y
        return y, inner.view(len(x), 2, 4, -1) if self.kind == "literal" else inner


@pytest.mark.parametrize(
    ("kind", "bound", "free"),
    [("centre", "second.1", "first.1"), ("inner", "first.1", "second.1"), ("literal", "first.1", "second.1")],
)
def test_what_training_alone_runs_still_runs(kind: str, bound: str, free: str) -> None:
    model = randomise_(InTraining(kind))
    before = copy.deepcopy(model.state_dict())
    random_state = torch.get_rng_state()
    pruner, compact = _halved(model)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.equal(model.centre, before["centre"])
    assert [site.name for site in pruner.sites] == [free]
    assert bound in [frozen.name for frozen in pruner.graph.frozen]
    assert compact.get_submodule(free).num_features == 4
    outputs, expected = (network.train()(IMAGE) for network in (compact, model))
    if kind != "centre":
        assert outputs[1].shape == expected[1].shape


class TwoTasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = _unit(3, 8), nn.Linear(8, 3), nn.Linear(8, 5)
        self.also_first = self.first  # a second name is no other head

    def forward(self, x: Tensor, task: str = "first") -> Tensor:
        return getattr(self, task)(self.body(x).mean((2, 3)))


def test_what_the_example_does_not_lead_to_is_named(caplog: pytest.LogCaptureFixture) -> None:
    found = sp.inspect(TwoTasks(), IMAGE)
    assert found.unreached == ("second.bias", "second.weight")
    assert "not reached by the example, so that what they read may be cut away: second.bias" in str(found)
    with caplog.at_level(logging.WARNING):
        sp.SoftPruner(TwoTasks(), IMAGE)
    assert "the example does not lead to second.bias, second.weight" in caplog.text


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = _unit(3, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.sub_(0.5).div_(0.25)).mean((2, 3)))


def test_a_network_that_writes_into_its_input() -> None:
    image = IMAGE.clone()
    _, compact = _halved(randomise_(InPlace()))
    assert compact.body[1].num_features == 4
    assert torch.equal(IMAGE, image)


class Mixed(nn.Module):
    """A product that no layer makes; the BatchNorm behind it reads a part of what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.bn, self.last = _unit(3, 8), nn.BatchNorm2d(8), _unit(8, 8)
        self.weight, self.head = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.tensordot(self.weight, self.body(x), ([1], [1])).transpose(0, 1)
        return self.head(self.last(F.relu(self.bn(mixed))).mean((2, 3)))


def test_a_cut_behind_an_operator_without_a_rule_can_be_cut_again() -> None:
    _, compact = _halved(randomise_(Mixed()))
    assert compact.bn.num_features == 4
    graph = read_graph(compact, IMAGE)
    assert not any("misreads" in frozen.reason for frozen in graph.frozen)
    assert "last.1" in [site.name for site in graph.sites]
    _, smaller = _halved(compact)
    torch.testing.assert_close(smaller.eval()(IMAGE), compact.eval()(IMAGE), rtol=1e-4, atol=1e-5)


def test_copies_keep_the_modes_of_their_parts() -> None:
    class Forgetful(nn.Sequential):
        def __deepcopy__(self, memo: dict[int, object]) -> nn.Sequential:
            return nn.Sequential(*(copy.deepcopy(part, memo) for part in self)).train()

    model = nn.Sequential(Forgetful(nn.BatchNorm2d(3), nn.ReLU()), nn.Dropout())
    model.eval()
    model[1].train()
    assert [part.training for part in duplicated(model).modules()] == [part.training for part in model.modules()]


def test_examples_and_networks_without_values() -> None:
    lazy = nn.Sequential(nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Conv2d(8, 3, 1))
    with pytest.raises(ModelError, match=r"'0\.weight', a lazy one; run the model once"):
        sp.inspect(lazy, IMAGE)
    assert isinstance(lazy[0], nn.LazyConv2d)
    for example in (IMAGE[:0], IMAGE.to("meta")):
        with pytest.raises(ModelError, match="`example` must hold at least one sample, with values"):
            sp.inspect(InPlace(), example)
