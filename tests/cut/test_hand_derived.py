"""Widths and costs by hand, so that freezing everything cannot pass."""

import pytest
import torch
from topologies import GROUPED, TOPOLOGIES, Topology, masks_of, randomise_
from torch import nn

from softprune.costs import cost
from softprune.cut import PrunePlan, apply_plan, cut_and_verify, make_plan
from softprune.cut.selection import read_graph
from softprune.graph import ChannelGraph, ConstantOutput, Select

Read = tuple[Topology, nn.Module, ChannelGraph]


@pytest.fixture(params=[*TOPOLOGIES, *GROUPED], ids=str, scope="module")
def read(request: pytest.FixtureRequest) -> Read:
    """A network of the table and its graph; the tests change neither."""
    topology = {**TOPOLOGIES, **GROUPED}[request.param]
    model = randomise_(topology.build())
    return topology, model, read_graph(model, topology.example(), kinds=topology.kinds)


def _widths(module: nn.Module) -> tuple[int, int]:
    if isinstance(module, ConstantOutput):
        return 0, len(module.value)
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    assert isinstance(module, nn.modules.conv._ConvNd)
    rows, columns = module.weight.shape[:2]
    if module.transposed:
        rows, columns = columns, rows
    assert (columns * module.groups, rows) == (module.in_channels, module.out_channels)
    return module.in_channels, module.out_channels


def test_widths_and_costs_are_those_of_the_hand(read: Read) -> None:
    topology, model, graph = read
    example, hand = topology.example(), topology.hand
    assert sorted(site.name for site in graph.sites) == sorted(hand.kept)
    assert sorted(frozen.name for frozen in graph.frozen) == sorted(topology.frozen)
    masks = masks_of(model, hand.kept)
    plan = make_plan(graph, model, masks)
    compact = apply_plan(plan, model)
    assert {name: _widths(compact.get_submodule(name)) for name in hand.widths} == hand.widths
    assert plan.macs == hand.macs
    selects = {name: len(m.index) for name, m in compact.named_modules() if isinstance(m, Select)}
    assert selects == {f"{name}.select": count for name, count in (hand.selects or {}).items()}

    counted = cost(compact, example)
    assert counted.macs == plan.macs
    assert counted.params == plan.params == sum(parameter.numel() for parameter in compact.parameters())
    dense = cost(model, example)
    assert (dense.macs, dense.params) == (plan.dense_macs, plan.dense_params)
    assert cut_and_verify(plan, model, masks, example)[1].max_difference < 1e-12


def test_the_plan_is_data(read: Read) -> None:
    topology, model, graph = read
    plan = make_plan(graph, model, masks_of(model, topology.hand.kept))
    again = PrunePlan.from_json(plan.to_json())
    assert again == plan
    assert again.to_json() == plan.to_json()
    # From data alone the same network comes out, but for constants, which come with the weights.
    shapes = {name: tensor.shape for name, tensor in apply_plan(plan, model).state_dict().items()}
    rebuilt = apply_plan(again, topology.build())
    assert {name: tensor.shape for name, tensor in rebuilt.state_dict().items()} == shapes


def test_nothing_is_cut_without_masks(read: Read) -> None:
    _, model, graph = read
    plan = make_plan(graph, model, {})
    assert not any(cut.changes for cut in plan.modules.values())
    compact = apply_plan(plan, model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(compact.state_dict()[name], tensor)
