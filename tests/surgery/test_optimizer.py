"""Training goes on after a cut: momentum is cut like the weights, and nothing else changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.surgery.comparing import masked, random_masks
from tests.topologies import TOPOLOGIES, randomise_
from torch import Tensor, nn

import softprune as sp
from softprune.errors import PlanError
from softprune.graph import trace
from softprune.plan import make_plan
from softprune.surgery import apply_plan

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.001, "amsgrad": True}),
}


@pytest.mark.parametrize("name", ["chain", "depthwise"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_step_after_a_cut_is_the_masked_step(name: str, kind: str) -> None:
    """In eval mode a cut network's gradients are those of the masked one; with cut momentum so are its steps."""
    topology = TOPOLOGIES[name]
    torch.manual_seed(0)
    model = randomise_(topology.build()).double()
    example = topology.example().double()
    make, options = OPTIMIZERS[kind]
    optimizer = make(model.parameters(), **options)
    for _ in range(2):
        _descend(model, optimizer, example)
    graph = trace(model, example)
    masks = random_masks(graph, 5)
    plan = make_plan(graph, model, masks)
    small = apply_plan(plan, model)

    reference = masked(model, masks)
    twin = make(reference.parameters(), **options)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    sp.remap_optimizer(optimizer, model, small)
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {
        id(p) for p in small.parameters()
    }
    before = _output(small, example)
    torch.testing.assert_close(before, _output(reference, example))
    _descend(small, optimizer, example)
    _descend(reference, twin, example)
    after = _output(small, example)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, _output(reference, example))


def test_groups_and_their_settings_stay() -> None:
    topology = TOPOLOGIES["chain"]
    model = randomise_(topology.build())
    graph = trace(model, topology.example())
    small = apply_plan(make_plan(graph, model, random_masks(graph, 1)), model)
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    others = [p for n, p in model.named_parameters() if not n.endswith("bias")]
    optimizer = torch.optim.SGD(
        [{"params": others, "weight_decay": 1e-4}, {"params": biases, "lr": 0.5}], lr=0.1
    )
    sp.remap_optimizer(optimizer, model, small)
    names = {id(p): n for n, p in small.named_parameters()}
    assert all(names[id(p)].endswith("bias") for p in optimizer.param_groups[1]["params"])
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
    assert optimizer.param_groups[0]["weight_decay"] == 1e-4


def test_a_network_that_was_never_cut_is_refused_and_the_optimizer_left_alone() -> None:
    model = TOPOLOGIES["chain"].build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [id(p) for p in optimizer.param_groups[0]["params"]]
    with pytest.raises(PlanError, match="network that softprune cut"):
        sp.remap_optimizer(optimizer, model, TOPOLOGIES["chain"].build())
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == before


def _descend(model: nn.Module, optimizer: torch.optim.Optimizer, example: Tensor) -> None:
    optimizer.zero_grad()
    model.eval()(example).square().mean().backward()
    optimizer.step()


def _output(model: nn.Module, example: Tensor) -> Tensor:
    with torch.no_grad():
        return model.eval()(example)
