"""Constants, liveness and the plan on networks of a few channels, each fact derived by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softprune.cut import apply_plan, blocks_of_sites, coupled_sites, cut_and_verify, make_plan, required_sites
from softprune.cut.analyses import Liveness, constant_contribution, constants
from softprune.cut.selection import read_graph
from softprune.graph import ChannelGraph, trace

IMAGES = torch.randn(2, 3, 4, 4)


class Net(nn.Module):
    """conv 3 -> 4, BatchNorm, ReLU, BatchNorm, conv 4 -> 2: a dead channel becomes the constant `shift`."""

    def __init__(self, padding: int = 0, *, last: nn.Module | None = None, shift: float = 0.5) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
        self.second = nn.BatchNorm2d(4)
        self.last = last or nn.Conv2d(4, 2, 3 if padding else 1, padding=padding)
        nn.init.constant_(self.second.bias, shift)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(F.relu(self.bn(self.conv(x)))))


class OwnConv(nn.Conv2d):
    """A class of the user's, whose forward() could compute more."""


class Twice(nn.Module):
    """One padded layer, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) * self.first(x)


class Embedded(nn.Module):
    """A learned vector scales channels through a layer, and is concatenated to others."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
        self.vector, self.scale = nn.Parameter(torch.randn(1, 3)), nn.Linear(3, 4)
        self.last = nn.Linear(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.conv(x))) * self.scale(self.vector).sigmoid()[:, :, None, None]
        return self.last(torch.cat([x.mean((2, 3)), (2 * self.vector).expand(len(x), -1)], 1))


class Halves(nn.Module):
    """Two layers read half of the channels each; the first must be called."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
        self.first, self.last = OwnConv(2, 2, 1), nn.Conv2d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.conv(x)))
        return self.first(x[:, 2:]) + self.last(x[:, :2])


class TwoPaths(nn.Module):
    """Two branches that are added: one of them may die."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.bn1 = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
        self.right, self.bn2 = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
        self.last = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.bn1(self.left(x))) + F.relu(self.bn2(self.right(x))))


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


@pytest.mark.parametrize(
    "last",
    [OwnConv(4, 2, 1), nn.Conv2d(4, 2, 1, groups=2), Twice()],
    ids=["a class of its own", "grouped", "padded and called twice"],
)
def test_layers_without_one_bias_of_their_own_read_constants(last: nn.Module) -> None:
    model = Net(last=last, shift=-0.5)
    plan = make_plan(of(model), model, {"bn": torch.tensor([True, False, True, False])})
    reader = plan.modules["last" if "last" in plan.modules else "last.first"]
    assert reader.inputs == (0, 1, 2, 3)
    assert not reader.folded


def test_layers_that_must_be_called_keep_one_input_of_dead_ones() -> None:
    model = Net(last=OwnConv(4, 2, 1), shift=0.0)
    cut = make_plan(of(model), model, {"bn": torch.zeros(4, dtype=torch.bool)}, round_to=2).modules["last"]
    assert not cut.constant
    assert cut.inputs == (0,)


def test_a_layer_that_must_be_called_reads_one_of_the_dead_channels() -> None:
    model = Halves()
    plan = make_plan(of(model), model, {"bn": torch.tensor([False, True, False, False])})
    assert (plan.modules["first"].inputs, plan.modules["last"].inputs) == ((0,), (1,))
    assert plan.modules["conv"].outputs == (1, 2)


def test_what_learned_parameters_give_is_not_constant() -> None:
    model = Embedded()
    graph = of(model)
    plan = make_plan(graph, model, {})
    assert not plan.parameters
    assert not any(cut.changes for cut in plan.modules.values())
    plan = make_plan(graph, model, {"bn": torch.tensor([True, False, True, False])})
    assert plan.modules["scale"].outputs == (0, 2)
    assert plan.modules["last"].inputs == (0, 2, 4, 5, 6)


@pytest.mark.parametrize("dead", [(), (1, 3), (0, 1, 2, 3)])
def test_shared_parameters_and_norms_without_any_are_counted(dead: tuple[int, ...]) -> None:
    model = nn.Sequential(
        Net(last=nn.Conv2d(4, 3, 1)), Net(last=nn.Conv2d(4, 2, 1)), nn.Conv2d(2, 3, 1), nn.Conv2d(3, 3, 1)
    )
    model[1].second = nn.BatchNorm2d(4, affine=False)
    model[2].bias = model[3].bias = model[0].last.bias
    model[0].last.scale = model[1].last.scale = nn.Parameter(torch.ones(3))  # which no cut changes
    mask = torch.tensor([channel not in dead for channel in range(4)])
    plan = make_plan(of(model), model, {"0.bn": mask, "1.bn": mask})
    compact = apply_plan(plan, model)
    assert plan.params == sum(parameter.numel() for parameter in compact.parameters())


def test_what_nothing_reads_is_neither_demanded_nor_present() -> None:
    model = TwoPaths()
    graph = of(model)
    values = constants(graph, model, {"bn1": kept(0), "bn2": kept(0, 1)})
    live = Liveness(graph, values).solve()
    for name in ("bn1", "bn2"):  # their channels are added, and so tied
        outputs = norm_outputs(graph, name)
        assert live.is_present(outputs).tolist() == [True, True, False, False]
    left, right = (next(layer for layer in graph.layers if layer.name == name) for name in ("left", "right"))
    assert not live.is_constant(left)
    assert not live.is_constant(right)
    assert live.dispensable(graph.layers[-1]).tolist() == [False, False, True, True]


def test_a_module_that_nothing_reads_keeps_one_channel_and_is_listed() -> None:
    model = Net()
    plan = make_plan(of(model), model, {"bn": torch.zeros(4, dtype=torch.bool)})
    assert plan.modules["last"].constant
    assert plan.macs == 0
    assert {name: len(cut.outputs) for name, cut in plan.modules.items() if name != "last"} == {
        "conv": 1,
        "bn": 1,
        "second": 1,
    }
    assert set(plan.kept_for_shape) == {"conv", "second"}


def test_required_sites_are_those_on_every_path_or_on_one() -> None:
    assert required_sites(of(Net())) == {"bn"}
    assert len(required_sites(of(TwoPaths()))) == 1


EXAMPLE = torch.randn(2, 3, 8, 8)


class _Block(nn.Module):
    """An inverted residual: widened, filtered channel by channel, narrowed again."""

    def __init__(self, groups: int = 24, again: int = 24, *, between: bool = False, shuffled: bool = False) -> None:
        super().__init__()
        self.expand, self.bn1 = nn.Conv2d(3, 24, 1, bias=False), nn.BatchNorm2d(24)
        self.filter, self.bn2 = nn.Conv2d(24, 24, 3, padding=1, groups=groups, bias=False), nn.BatchNorm2d(24)
        self.again, self.bn3 = nn.Conv2d(24, 24, 3, padding=1, groups=again, bias=False), nn.BatchNorm2d(24)
        self.project, self.head = nn.Conv2d(24, 8, 1), nn.Linear(8, 5)
        self.between, self.shuffled = between, shuffled

    def forward(self, x: Tensor) -> Tensor:
        wide = F.relu6(self.bn1(self.expand(x)))
        if self.shuffled:
            wide = wide.flip(1)
        y = F.relu6(self.bn2(self.filter(F.pad(wide, (1, 0, 1, 0)))[:, :, 1:, 1:]))
        if self.between:
            y = y + wide
        y = F.relu6(self.bn3(self.again(y)))
        return self.head(self.project(y).mean((2, 3)))


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ({}, (("bn1", "bn2", "bn3"),)),
        ({"groups": 12}, (("bn2", "bn3"),)),  # two channels mix
        ({"groups": 1}, (("bn2", "bn3"),)),
        ({"between": True}, (("bn1", "bn2"),)),  # either of them is enough for the sum
        ({"shuffled": True}, (("bn2", "bn3"),)),  # another order
    ],
)
def test_lines_are_found(options: dict[str, Any], lines: tuple[tuple[str, ...], ...]) -> None:
    assert coupled_sites(read_graph(_Block(**options), EXAMPLE)) == lines


@pytest.mark.parametrize(
    ("options", "round_to", "blocks"),
    [
        ({}, 1, {("bn1", "bn2", "bn3"): 1}),
        ({"groups": 6}, 1, {("bn1", "bn2", "bn3"): 4}),  # depthwise after grouped
        ({"groups": 6}, 4, {("bn1", "bn2", "bn3"): 4}),
        ({"groups": 6}, 8, {("bn2", "bn3"): 1}),  # two groups at a time are too much
        ({"groups": 8}, 2, {("bn2", "bn3"): 1}),  # six channels hold whole groups and are even: too much
        ({"groups": 4}, 1, {("bn2", "bn3"): 1}),  # few groups
        ({"groups": 12, "again": 6}, 1, {("bn1", "bn2", "bn3"): 4}),
        ({"groups": 12, "again": 8}, 1, {("bn1", "bn2"): 2}),  # groups of 2 and of 3 end together after 6
        ({"groups": 12, "between": True}, 1, {("bn1", "bn2"): 2}),
        ({"groups": 12, "shuffled": True}, 1, {("bn2", "bn3"): 1}),
    ],
)
def test_sites_around_grouped_convolutions_lose_whole_groups(
    options: dict[str, Any], round_to: int, blocks: dict[tuple[str, ...], int]
) -> None:
    assert blocks_of_sites(read_graph(_Block(**options), EXAMPLE), round_to) == blocks


class _Stream(nn.Module):
    """Two BatchNorms whose sum, one site, is filtered channel by channel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.bn1 = nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6)
        self.second, self.bn2 = nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6)
        self.filter, self.bn3 = nn.Conv2d(6, 6, 3, groups=6), nn.BatchNorm2d(6)
        self.project = nn.Conv2d(6, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.first(x)) + self.bn2(self.second(x)))
        return self.project(F.relu(self.bn3(self.filter(y))))


def test_the_sum_of_a_sites_batchnorms_is_coupled_to_what_filters_it() -> None:
    graph = read_graph(_Stream(), EXAMPLE, kinds={"sum"})
    assert coupled_sites(graph) == (("bn1", "bn3"),)


class _Shared(nn.Module):
    """One BatchNorm after a layer of `groups` groups that reads another site or itself, and before such a layer."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.first, self.bn1 = nn.Conv2d(3, 12, 1), nn.BatchNorm2d(12)
        self.shared, self.bn3 = nn.BatchNorm2d(12), nn.BatchNorm2d(12)
        self.one, self.two = (nn.Conv2d(12, 12, 3, padding=1, groups=groups) for _ in range(2))
        self.mix, self.head = nn.Conv2d(12, 12, 1), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.shared(self.one(F.relu(self.bn1(self.first(x))))))
        y = F.relu(self.shared(self.mix(y)))
        return self.head(F.relu(self.bn3(self.two(y))).mean((2, 3)))


@pytest.mark.parametrize(("groups", "block"), [(12, 1), (6, 2)])
def test_a_site_is_in_one_group(groups: int, block: int) -> None:
    assert blocks_of_sites(read_graph(_Shared(groups), EXAMPLE)) == {("bn1", "shared"): block}


class _Grouped(nn.Module):
    """A residual stream that a grouped convolution reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn1 = nn.Conv2d(3, 12, 1), nn.BatchNorm2d(12)
        self.conv, self.bn2 = nn.Conv2d(12, 12, 3, padding=1, groups=6), nn.BatchNorm2d(12)
        self.head = nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.stem(x))
        return self.head(F.relu(x + self.bn2(self.conv(x))).mean((2, 3)))


def test_a_stream_through_a_grouped_convolution_loses_whole_groups() -> None:
    graph = read_graph(_Grouped(), EXAMPLE, kinds={"stream"})
    assert blocks_of_sites(graph) == {("bn1",): 2}
    assert coupled_sites(graph) == ()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_constants_are_those_of_the_device(device: str) -> None:
    """A GPU computes Hardsigmoid with a sixth in float32, in float64 too: a constant of a CPU would be off by 1e-8."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 1))
            self.gate, self.last, self.other = nn.Hardsigmoid(), nn.Conv2d(6, 4, 1), nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.gate(self.inner(x))) + self.other(x)

    network, images = Gated().to(device).eval(), torch.randn(2, 3, 8, 8, device=device)
    graph = read_graph(network, images)
    masks = {site.name: torch.zeros(site.width, dtype=torch.bool) for site in graph.sites}
    _, certificate = cut_and_verify(make_plan(graph, network, masks), network, masks, images)
    assert certificate.max_difference < 1e-14
