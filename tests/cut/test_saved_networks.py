"""What survives the disk, and a cut of a cut."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import assert_exact, masked, random_masks, relative_difference
from topologies import TOPOLOGIES, Chain, Tied, randomise_
from torch import nn

from softprune import models
from softprune.cut import PrunePlan, apply_plan, load, make_plan, plans_of, required_sites, save
from softprune.cut.selection import read_graph
from softprune.errors import SoftpruneError
from softprune.graph import ChannelGraph, ConstantOutput


def _cut(model: nn.Module, graph: ChannelGraph, seed: int = 0, deaths: float = 0.4) -> nn.Module:
    return apply_plan(make_plan(graph, model, random_masks(graph, seed, deaths=deaths)), model)


def _chain() -> Chain:
    model = randomise_(Chain())
    compact = _cut(model, read_graph(model, torch.randn(2, 3, 8, 8)), deaths=0)
    assert isinstance(compact, Chain)
    return compact


@pytest.mark.parametrize(
    "name", ["pre-activation", "dense", "inverted residual", "dead branch", "depthwise", "flatten", "tied"]
)
def test_a_cut_of_a_cut_and_back_from_disk(name: str, tmp_path: Path) -> None:
    topology = TOPOLOGIES[name]
    model, example = randomise_(topology.build()), topology.example()
    once = _cut(model, read_graph(model, example), 1)
    graph = read_graph(once, example)
    masks = random_masks(graph, 2, deaths=0.3)
    plan = make_plan(graph, once, masks)
    twice = apply_plan(plan, once)
    wide = copy.deepcopy(once).double()
    assert relative_difference(masked(wide, masks), apply_plan(plan, wide), example) <= 1e-10
    save(twice, tmp_path / "twice")
    again = load(tmp_path / "twice", topology.build())
    assert torch.equal(again(example), twice(example))
    assert len(plans_of(again)) == len(plans_of(twice)) == 2


def test_a_second_cut_shortens_the_index_of_the_first() -> None:
    topology = TOPOLOGIES["pre-activation"]
    model, example = randomise_(topology.build()), topology.example()
    graph = read_graph(model, example)
    keep = {site.name: torch.arange(site.width) % 2 == 0 for site in graph.sites}
    keep["bn"] = torch.arange(8) < 5
    once = apply_plan(make_plan(graph, model, keep), model)
    graph = read_graph(once, example)
    again = {site.name: torch.arange(site.width) < max(site.width // 2, 1) for site in graph.sites}
    twice = apply_plan(make_plan(graph, once, again), once)
    before = {name: len(m.index) for name, m in once.named_modules() if name.endswith("select")}  # type: ignore[arg-type]
    after = {name: len(m.index) for name, m in twice.named_modules() if name.endswith("select")}  # type: ignore[arg-type]
    assert before == {"blocks.0.bn1.select": 4, "blocks.1.bn1.select": 4, "bn.select": 5}
    assert after == {"blocks.0.bn1.select": 2, "blocks.1.bn1.select": 2, "bn.select": 2}


def test_tied_weights_are_tied_again(tmp_path: Path) -> None:
    model = randomise_(Tied())
    save(_cut(model, read_graph(model, torch.randn(2, 3, 8, 8)), 3, deaths=0), tmp_path / "tied")
    again = load(tmp_path / "tied", Tied())
    assert again.near.weight is again.far.weight


def test_dtype_and_gradients_survive_the_disk(tmp_path: Path) -> None:
    dense = Chain()
    dense.fc.weight.requires_grad_(False)
    model = randomise_(copy.deepcopy(dense)).double()
    save(_cut(model, read_graph(model, torch.randn(2, 3, 8, 8))), tmp_path / "wide")
    again = load(tmp_path / "wide", dense)
    assert again.conv1.weight.dtype == torch.float64
    assert again.conv1.weight.requires_grad
    assert not again.fc.weight.requires_grad
    assert not again.training


def test_a_changed_architecture_names_what_changed(tmp_path: Path) -> None:
    save(_chain(), tmp_path / "small")
    changed = Chain()
    changed.fc = nn.Linear(6, 7)
    _refused(tmp_path / "small", changed, r"'fc.bias' is \(5,\). Got \(7,\)")
    added = Chain()
    added.extra = nn.Linear(2, 2)
    _refused(tmp_path / "small", added, "'extra.bias' is absent. Got")


def _refused(folder: Path, model: nn.Module, says: str) -> None:
    before, structure = copy.deepcopy(model.state_dict()), str(model)
    with pytest.raises(SoftpruneError, match=says):
        load(folder, model)
    assert str(model) == structure
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (models.resnet20, {}),
        (models.resnet20, {"round_to": 8}),
        (models.resnet20, {"gathers": False}),
        (models.densenet40, {}),
    ],
)
def test_branches_that_died_in_one_cut_shrink_in_the_next(
    build: Callable[[], nn.Module], options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model = randomise_(build())
    graph = read_graph(model, torch.randn(1, 3, 32, 32))
    masks = random_masks(graph, 0)
    free = [site.name for site in graph.sites if site.name not in required_sites(graph)]
    for dead in free[3:9:3]:
        masks[dead][:] = False
    once = apply_plan(make_plan(graph, model, masks, **options), model)
    voids = [name for name, module in once.named_modules() if isinstance(module, ConstantOutput)]
    assert voids
    again = read_graph(once, torch.randn(1, 3, 32, 32))
    assert not [frozen for frozen in again.frozen if "trial" in frozen.reason]
    plan = assert_exact(again, once, random_masks(again, 1))
    assert any(plan.modules[name].changes for name in voids)
    twice = apply_plan(plan, once)
    fresh = build()
    for each in plans_of(twice):
        fresh = apply_plan(PrunePlan.from_json(each.to_json()), fresh)
    fresh.load_state_dict(twice.state_dict())
    torch.testing.assert_close(fresh.eval()(again.example.args[0]), twice.eval()(again.example.args[0]))
