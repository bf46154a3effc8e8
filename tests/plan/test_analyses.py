"""Constants, liveness and the plan on networks of a few channels, each fact derived by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softprune.errors import PlanError
from softprune.graph import ChannelGraph, trace
from softprune.plan import coupled_sites, dense_macs, make_plan, required_sites
from softprune.plan.constants import constant_contribution, constants
from softprune.plan.liveness import Liveness

IMAGES = torch.randn(2, 3, 4, 4)


class Net(nn.Module):
    """conv 3 -> 4, BatchNorm, ReLU, BatchNorm, conv 4 -> 2."""

    def __init__(self, padding: int = 0) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
        self.second, self.last = nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3 if padding else 1, padding=padding)
        nn.init.constant_(self.second.bias, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(F.relu(self.bn(self.conv(x)))))


class Parallel(nn.Module):
    """Paths of two BatchNorms each, whose results are added."""

    def __init__(self, paths: int) -> None:
        super().__init__()
        self.paths = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU()
            )
            for _ in range(paths)
        )
        self.last = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(sum(path(x) for path in self.paths))


class TwoPaths(nn.Module):
    """Two branches that are added: one of them may die."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.bn1 = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
        self.right, self.bn2 = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
        self.last = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.bn1(self.left(x))) + F.relu(self.bn2(self.right(x))))


class Depthwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn1 = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
        self.depthwise, self.bn2 = nn.Conv2d(4, 4, 3, groups=4), nn.BatchNorm2d(4)
        self.last = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.bn2(self.depthwise(F.relu(self.bn1(self.conv(x)))))))


def of(model: nn.Module) -> ChannelGraph:
    return trace(model.eval(), IMAGES)


def norm_outputs(graph: ChannelGraph, name: str) -> np.ndarray:
    return next(norm for norm in graph.norms if norm.name == name).outputs


def kept(*channels: int) -> np.ndarray:
    return np.isin(np.arange(4), channels)


def test_a_dropped_channel_is_zero_and_a_second_norm_makes_it_another_constant() -> None:
    model = Net()
    graph = of(model)
    values = constants(graph, model, {"bn": kept(0, 1)})
    first, second = (values[norm_outputs(graph, name)] for name in ("bn", "second"))
    assert np.isnan(first[:2]).all()
    assert first[2:].tolist() == [0.0, 0.0]
    assert np.isnan(second[:2]).all()
    assert second[2:] == pytest.approx(0.5)  # (0 - mean 0) / sqrt(1 + eps) * 1 + 0.5


def test_a_layer_of_constants_alone_gives_constants_unless_it_pads() -> None:
    for padding in (0, 1):
        model = Net(padding)
        graph = of(model)
        values = constants(graph, model, {"bn": kept()})
        last = values[graph.layers[-1].outputs]
        if padding:
            assert np.isnan(last).all()
        else:
            expected = model.last.bias + 0.5 * model.last.weight.sum((1, 2, 3))
            assert last == pytest.approx(expected.detach().numpy())


def test_the_contribution_of_dropped_constants() -> None:
    weight = torch.arange(8.0).reshape(2, 4, 1, 1)
    values = np.array([np.nan, 1.0, np.nan, 10.0])
    assert constant_contribution(weight, np.array([0, 2]), values).tolist() == [31.0, 75.0]  # 1 + 30, 5 + 70


def test_constants_fold_and_disappear_where_no_padding_is() -> None:
    for padding, folded, width in ((0, True, 2), (1, False, 4)):
        model = Net(padding)
        plan = make_plan(of(model), model, {"bn": torch.tensor([True, True, False, False])})
        assert plan.modules["last"].folded is folded
        assert len(plan.modules["last"].inputs) == width
        assert plan.modules["second"].outputs == tuple(range(width))
        assert plan.modules["conv"].outputs == tuple(range(width))


def test_what_nothing_reads_is_neither_demanded_nor_present() -> None:
    model = TwoPaths()
    graph = of(model)
    values = constants(graph, model, {"bn1": kept(0), "bn2": kept(0, 1)})
    live = Liveness(graph, values).solve()
    for name in ("bn1", "bn2"):  # their channels are added, and so tied
        outputs = norm_outputs(graph, name)
        assert live.is_present(outputs).tolist() == [True, True, False, False]
    left, right = (next(layer for layer in graph.layers if layer.name == name) for name in ("left", "right"))
    assert not live.is_void(left)
    assert not live.is_void(right)
    assert live.dispensable(graph.layers[-1]).tolist() == [False, False, True, True]


def test_multiples_are_filled_up() -> None:
    model = Net()
    graph = of(model)
    mask = {"bn": torch.tensor([True, False, False, False])}
    assert len(make_plan(graph, model, mask).modules["conv"].outputs) == 1
    plan = make_plan(graph, model, mask, round_to=2)
    assert len(plan.modules["conv"].outputs) == 2
    assert plan.modules["bn"].zeroed == (1,)


def test_a_module_that_nothing_reads_keeps_one_channel_and_is_listed() -> None:
    model = Net()
    plan = make_plan(of(model), model, {"bn": torch.zeros(4, dtype=torch.bool)})
    assert plan.modules["last"].void
    assert plan.macs == 0
    assert {name: len(cut.outputs) for name, cut in plan.modules.items() if name != "last"} == {
        "conv": 1,
        "bn": 1,
        "second": 1,
    }
    assert set(plan.floored) == {"conv", "second"}


def test_required_sites_are_those_on_every_path_or_on_one() -> None:
    assert required_sites(of(Net())) == {"bn"}
    assert len(required_sites(of(TwoPaths()))) == 1


@pytest.mark.parametrize("paths", [3, 4, 7])
def test_of_parallel_paths_the_sites_of_the_last_are_required(paths: int) -> None:
    model = Parallel(paths)
    assert required_sites(of(model)) == {f"paths.{paths - 1}.1", f"paths.{paths - 1}.4"}


def test_sites_around_a_depthwise_convolution_are_coupled() -> None:
    assert coupled_sites(of(Depthwise())) == (("bn1", "bn2"),)
    assert coupled_sites(of(TwoPaths())) == ()


def test_dense_macs_are_those_of_the_layers() -> None:
    assert dense_macs(of(Net())) == 16 * (3 * 4 + 4 * 2)


def test_masks_must_be_for_sites_and_of_their_width() -> None:
    model = Net()
    graph = of(model)
    with pytest.raises(PlanError, match=r"Got 'conv'; its sites: bn"):
        make_plan(graph, model, {"conv": torch.ones(4, dtype=torch.bool)})
    with pytest.raises(PlanError, match=r"must have shape \(4,\)\. Got \(5,\)"):
        make_plan(graph, model, {"bn": torch.ones(5, dtype=torch.bool)})
