"""A short network of each of the paper's families, cut at random: exact, and the same exported, compiled and from disk.

`make zoo` cuts the networks of the paper themselves.
"""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from comparing import assert_exact, random_masks
from topologies import randomise_
from torch import nn

from softprune import models
from softprune.costs import cost
from softprune.cut import PrunePlan, apply_plan, floor_masks, load, save
from softprune.cut.selection import read_graph
from softprune.graph import ChannelGraph
from softprune.models.resnet_imagenet import Bottleneck

pytestmark = pytest.mark.usefixtures("onednn")

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "vgg": lambda: models.VGG([[8, 8], [16, 16], [32] * 3, [64] * 3, [64] * 3]),
    "pre-activation": lambda: models.PreActResNet(2),
    "bottleneck": lambda: models.BottleneckResNet(2),
    "option-A": lambda: models.OptionAResNet(2),
    "imagenet": lambda: models.ResNet(Bottleneck, (2, 1, 1, 1), 10, small_images=True),
    "concatenation": lambda: models.DenseNet(4),
}
EXAMPLE = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@functools.cache
def _cut(name: str) -> tuple[nn.Module, ChannelGraph, PrunePlan]:
    torch.manual_seed(0)
    model = randomise_(NETWORKS[name]())
    graph = read_graph(model, EXAMPLE)
    return model, graph, assert_exact(graph, model, random_masks(graph, 0, deaths=0.1))


@pytest.mark.parametrize("name", NETWORKS)
def test_a_cut_is_exact_and_can_be_exported_and_saved(name: str, tmp_path: Path) -> None:
    model, graph, plan = _cut(name)
    assert not [frozen for frozen in graph.frozen if "trial" in frozen.reason]
    assert_exact(graph, model, floor_masks(graph))
    assert plan.macs < 0.7 * plan.dense_macs
    compact = apply_plan(plan, model).eval()
    counted = cost(compact, EXAMPLE)
    assert (counted.macs, counted.params) == (plan.macs, plan.params)

    save(compact, tmp_path / name)
    loaded = load(tmp_path / name, NETWORKS[name]()).eval()
    exported = torch.export.export(compact, (EXAMPLE,), strict=False).module()
    with torch.no_grad():
        expected = compact(EXAMPLE)
        for other in (loaded, exported):
            assert (other(EXAMPLE) - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", ["bottleneck", "concatenation"])
def test_a_cut_compiles_in_one_piece(name: str) -> None:
    model, _, plan = _cut(name)
    network = apply_plan(plan, model).eval()
    torch.compiler.reset()
    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(EXAMPLE), network(EXAMPLE), rtol=1e-5, atol=1e-5)
