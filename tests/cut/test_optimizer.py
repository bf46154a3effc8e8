"""Training goes on after a cut: momentum is cut like the weights, and nothing else changes."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from comparing import masked, random_masks
from topologies import TOPOLOGIES, randomise_
from torch import Tensor, nn

import softprune as sp
from softprune.cut import apply_plan, make_plan
from softprune.graph import trace

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
    model.again = list(model.children())[1]  # plans name modules by the first of their names
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
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {id(p) for p in small.parameters()}
    assert {id(p) for p in optimizer.state} <= {id(p) for p in small.parameters()}
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
    model.again = model.conv2
    graph = trace(model, topology.example())
    small = apply_plan(make_plan(graph, model, random_masks(graph, 1)), model)
    biases = [(n, p) for n, p in model.named_parameters() if n.endswith("bias")]
    others = [(n, p) for n, p in model.named_parameters() if not n.endswith("bias")]
    optimizer = torch.optim.SGD([{"params": others, "weight_decay": 1e-4}, {"params": biases, "lr": 0.5}], lr=0.1)
    temperature = nn.Parameter(torch.ones(()))  # of the loss
    optimizer.add_param_group({"params": [("temperature", temperature)], "lr": 0.2})
    sp.remap_optimizer(optimizer, model, small)
    names = {id(p): n for n, p in small.named_parameters()}
    assert all(names[id(p)].endswith("bias") for p in optimizer.param_groups[1]["params"])
    names[id(temperature)] = "temperature"
    for group in optimizer.param_groups:
        assert group["param_names"] == [names[id(p)] for p in group["params"]]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5, 0.2]
    assert optimizer.param_groups[2]["params"][0] is temperature
    assert optimizer.param_groups[0]["weight_decay"] == 1e-4


def test_state_that_cannot_be_cut_starts_anew_as_a_whole(caplog: pytest.LogCaptureFixture) -> None:
    """Adafactor keeps factors of the second moment, and takes a state without them for a whole one."""
    topology = TOPOLOGIES["chain"]
    model, example = randomise_(topology.build()), topology.example()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.01)
    _descend(model, optimizer, example)
    graph = trace(model, example)
    small = apply_plan(make_plan(graph, model, random_masks(graph, 5)), model)
    with caplog.at_level(logging.WARNING):
        sp.remap_optimizer(optimizer, model, small)
    assert "reset the optimizer state of 'conv2.weight', since its 'row_var' cannot be cut" in caplog.text
    parameters = dict(small.named_parameters())
    assert not optimizer.state.get(parameters["conv2.weight"])
    assert optimizer.state[parameters["bn2.weight"]]["variance"].shape == parameters["bn2.weight"].shape
    before = _output(small, example)
    _descend(small, optimizer, example)
    assert not torch.equal(before, _output(small, example))
    assert optimizer.state[parameters["conv2.weight"]]["step"] == 1


def _descend(model: nn.Module, optimizer: torch.optim.Optimizer, example: Tensor) -> None:
    optimizer.zero_grad()
    model.eval()(example).square().mean().backward()
    optimizer.step()


def _output(model: nn.Module, example: Tensor) -> Tensor:
    with torch.no_grad():
        return model.eval()(example)
