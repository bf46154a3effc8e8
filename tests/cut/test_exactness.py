"""masked == compact: over the topology table and networks of other people."""

import functools

import pytest
import torch
from comparing import assert_exact, random_masks
from topologies import TOPOLOGIES, randomise_
from torch import nn

from softprune import models
from softprune.cut import apply_plan, floor_masks, make_plan
from softprune.cut.selection import read_graph
from softprune.graph import ChannelGraph
from softprune.graph.modules import Select


@functools.cache
def _topology(name: str) -> tuple[nn.Module, ChannelGraph]:
    torch.manual_seed(0)
    model = randomise_(TOPOLOGIES[name].build())
    return model, read_graph(model, TOPOLOGIES[name].example())


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("seed", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_topologies_under_random_masks(name: str, seed: int) -> None:
    model, graph = _topology(name)
    assert_exact(graph, model, random_masks(graph, seed, deaths=0.0 if seed < 2 else 0.5))


@pytest.mark.usefixtures("onednn")
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_topologies_with_all_dead_that_may_die(name: str) -> None:
    model, graph = _topology(name)
    assert_exact(graph, model, floor_masks(graph))


@pytest.mark.slow
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_topologies_with_everything_dead(name: str) -> None:
    # A floor keeps users from this, but the cut is exact all the same: a constant network.
    model, graph = _topology(name)
    assert_exact(graph, model, {site.name: torch.zeros(site.width, dtype=torch.bool) for site in graph.sites})


def _foreign(name: str) -> nn.Module:
    library, _, model = name.partition(":")
    if library == "softprune":
        return models.build(model, 10)
    if library == "timm":
        return pytest.importorskip("timm", reason='the "timm" extra is not installed').create_model(
            model, num_classes=10
        )
    torchvision = pytest.importorskip("torchvision", reason='the "vision" extra is not installed')
    return torchvision.models.get_model(model, weights=None, num_classes=10)


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("softprune:resnet20", 0.7),
        ("softprune:densenet40", 0.7),
        ("torchvision:shufflenet_v2_x0_5", 0.6),
        ("torchvision:mobilenet_v3_small", 0.7),
        ("timm:resnetv2_18d", 1.0),  # GroupNorm: nothing to prune
        ("timm:seresnext26t_32x4d", 0.8),
        ("timm:rexnet_100", 0.9),  # adds into a slice of its own stream
    ],
)
def test_known_networks(name: str, share: float) -> None:
    torch.manual_seed(0)
    try:
        model = randomise_(_foreign(name))
    except RuntimeError:
        pytest.skip(f"this timm has no {name}")
    graph = read_graph(model, torch.randn(1, 3, 64, 64))
    assert not [frozen for frozen in graph.frozen if "trial" in frozen.reason]
    plan = assert_exact(graph, model, random_masks(graph, 0, deaths=0.1))
    assert plan.macs <= share * plan.dense_macs


@pytest.mark.parametrize("name", ["chain", "pre-activation", "inverted residual", "dense"])
def test_rounding_is_exact_too(name: str) -> None:
    model, graph = _topology(name)
    masks = random_masks(graph, 3)
    plan = assert_exact(graph, model, masks, round_to=4)
    for mix in graph.layers:
        cut = plan.modules[mix.name]
        assert cut.constant or len(cut.outputs) % 4 == 0 or len(cut.outputs) == cut.width_out, mix.name
    for norm in graph.norms:
        cut = plan.modules[norm.name]
        dead = len(cut.zeroed) == len(cut.outputs)  # nobody reads it
        assert cut.select is None or dead or len(cut.outputs) % 4 == 0, norm.name
    assert plan.macs >= make_plan(graph, model, masks).macs


@pytest.mark.slow
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_without_gathers_nothing_is_indexed_and_all_is_exact(name: str) -> None:
    model, graph = _topology(name)
    masks = random_masks(graph, 1, deaths=0.3)
    plan = assert_exact(graph, model, masks, gathers=False)
    compact = apply_plan(plan, model)
    assert _indices(compact) == _indices(model)  # what a network gathers itself stays
    usual = make_plan(graph, model, masks)
    assert usual.macs <= plan.macs <= plan.dense_macs


def test_gathers_are_what_the_cut_of_a_concatenation_lives_on() -> None:
    model, graph = _topology("dense")
    masks = random_masks(graph, 3)
    usual, whole = (make_plan(graph, model, masks, gathers=gathers) for gathers in (True, False))
    assert _indices(apply_plan(usual, model)) > 0
    assert usual.macs < whole.macs


def _indices(model: nn.Module) -> int:
    return sum(isinstance(module, Select) for module in model.modules())
