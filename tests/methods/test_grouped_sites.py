"""SCP on sites of several BatchNorms: training, targets, copies, cuts, files and resuming."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from topologies import GROUPED, Topology, randomise_
from torch import nn

import softprune as sp
from softprune.masks import is_masked


def train(pruner: sp.SoftPruner, topology: Topology, steps: int, *, lr: float = 0.05) -> None:
    optimizer = torch.optim.SGD(pruner.parameter_groups(), lr=lr, momentum=0.9)
    pruner.attach(optimizer)
    pruner.model.train()
    for step in range(steps):
        images = topology.example(8, seed=step)
        labels = torch.randint(5, (8,), generator=torch.Generator().manual_seed(step))
        loss = pruner.loss(F.cross_entropy(pruner.model(images), labels))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    pruner.model.eval()


def members(pruner: sp.SoftPruner) -> list[nn.Module]:
    return [pruner.model.get_submodule(name) for site in pruner.sites for name in site.members]


@pytest.fixture(params=["sum of branches", "linear stream", "zero channels around a stream"])
def topology(request: pytest.FixtureRequest) -> Topology:
    return GROUPED[request.param]


@pytest.mark.parametrize("name", GROUPED)
def test_what_is_trained_is_cut_saved_and_loaded(name: str, tmp_path: Path) -> None:
    topology = GROUPED[name]
    model = randomise_(topology.build())
    pruner = sp.SoftPruner(model, topology.example(), strength=0.04, site_kinds=topology.kinds)
    assert not pruner.graph.frozen
    assert all(is_masked(norm) for norm in members(pruner))
    train(pruner, topology, 30)
    masks = pruner.masks()
    assert any(not mask.all() for mask in masks.values())
    expected = model(topology.example())
    small = pruner.compact()
    assert torch.allclose(small(topology.example()), expected, atol=1e-5)
    assert sp.cost(small, topology.example()).macs < sp.cost(model, topology.example()).macs
    sp.save(small, tmp_path / "small.safetensors")
    loaded = sp.load(tmp_path / "small.safetensors", topology.build()).eval()
    assert torch.equal(loaded(topology.example()), small(topology.example()))


def test_a_plain_copy_is_judged_and_cut_alike(topology: Topology) -> None:
    model = randomise_(topology.build())
    plain = copy.deepcopy(model)
    pruner = sp.SoftPruner(model, topology.example(), strength=0.04, site_kinds=topology.kinds)
    train(pruner, topology, 20)
    plain.load_state_dict(model.state_dict())
    assert all(torch.equal(mask, pruner.masks(plain)[name]) for name, mask in pruner.masks().items())
    images = topology.example()
    assert torch.equal(pruner.compact(plain)(images), pruner.compact()(images))


def test_a_target_is_met(topology: Topology) -> None:
    model = randomise_(topology.build())
    pruner = sp.SoftPruner(model, topology.example(), target={"macs": 0.6}, total_steps=20, site_kinds=topology.kinds)
    train(pruner, topology, 20)
    kept = sp.cost(pruner.compact(), topology.example()).macs / sp.cost(topology.build(), topology.example()).macs
    assert kept <= 0.6


def test_a_target_masks_all_kinds_of_sites() -> None:
    topology = GROUPED["linear stream"]
    strength, target = {}, {"target": {"macs": 0.6}, "total_steps": 20}
    found = [sp.SoftPruner(topology.build(), topology.example(), **given).site_kinds for given in (strength, target)]
    assert found == [("sum",), ("sum", "linear", "stream")]


def test_training_resumes_exactly(topology: Topology) -> None:
    models = [randomise_(topology.build()) for _ in range(2)]
    pruners = [sp.SoftPruner(each, topology.example(), site_kinds=topology.kinds) for each in models]
    train(pruners[0], topology, 3)
    models[1].load_state_dict(models[0].state_dict())
    pruners[1].load_state_dict(pruners[0].state_dict())
    images = topology.example(4)
    outputs = [each.train()(images) for each in models]
    assert torch.equal(*outputs)


def test_floors_and_multiples_hold_for_the_shared_mask(topology: Topology) -> None:
    model = randomise_(topology.build())
    pruner = sp.SoftPruner(
        model, topology.example(), site_kinds=topology.kinds, min_channels=2, round_to=2, strength=0.0
    )
    with torch.no_grad():
        for norm in members(pruner):
            norm.bias.fill_(0.0)
            norm.weight.fill_(1e-3)  # dead, one-sided and two-sided
    assert all(int(mask.sum()) == 2 for mask in pruner.masks().values())
    pruner.compact()


def test_include_and_exclude_take_a_site_as_a_whole() -> None:
    topology = GROUPED["projection shortcut"]
    model, example = topology.build(), topology.example()
    excluded = sp.SoftPruner(model, example, exclude="bn3")
    assert [site.name for site in excluded.sites] == ["bn", "bn1"]
    excluded.detach()
    included = sp.SoftPruner(model, example, include="bn3")
    assert [site.members for site in included.sites] == [("bn2", "bn3")]
