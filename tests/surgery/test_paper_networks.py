"""One network of each of the paper's families, cut at random: exact, and the same exported, compiled and from disk.

`make zoo` cuts all of them.
"""

from pathlib import Path

import pytest
import torch
from comparing import assert_exact, random_masks
from topologies import randomise_
from torch import nn

from softprune import models
from softprune.costs import cost
from softprune.inspection import floor_masks
from softprune.plan import required_sites
from softprune.selection import read_graph
from softprune.surgery import apply_plan, load, save


@pytest.mark.parametrize("name", ["vgg16", "resnet20", "resnet56_a", "resnet50_64", "densenet40"])
def test_a_cut_is_exact_and_can_be_exported_and_saved(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = randomise_(models.build(name, 10))
    channels, *space = models.REGISTRY[name].input_shape
    example = torch.randn(2, channels, *(min(size, 32) for size in space))
    graph = read_graph(model, example)
    assert not [frozen for frozen in graph.frozen if "trial" in frozen.reason]
    assert_exact(graph, model, floor_masks(graph, required_sites(graph)))
    plan = assert_exact(graph, model, random_masks(graph, 0, deaths=0.1))
    assert plan.macs < 0.7 * plan.dense_macs
    compact = apply_plan(plan, model).eval()
    counted = cost(compact, example)
    assert (counted.macs, counted.params) == (plan.macs, plan.params)

    save(compact, tmp_path / name)
    loaded = load(tmp_path / name, models.build(name, 10)).eval()
    exported = torch.export.export(compact, (example,), strict=False).module()
    with torch.no_grad():
        expected = compact(example)
        for other in (loaded, exported):
            assert (other(example) - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("model", [models.BottleneckResNet(2), models.DenseNet(4)], ids=["bottleneck", "concatenation"])
def test_a_cut_compiles_in_one_piece(model: nn.Module) -> None:
    torch.manual_seed(0)
    example = torch.randn(2, 3, 32, 32)
    graph = read_graph(randomise_(model), example)
    plan = assert_exact(graph, model, random_masks(graph, 0, deaths=0.1))
    network = apply_plan(plan, model).eval()
    torch.compiler.reset()
    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(example), network(example), rtol=1e-5, atol=1e-5)
