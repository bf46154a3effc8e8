"""What the public functions refuse, and the word that says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from topologies import TOPOLOGIES, Chain, randomise_
from torch import nn

import softprune as sp
from softprune.cut import PrunePlan, apply_plan, cut_and_verify, make_plan
from softprune.cut.selection import read_graph
from softprune.errors import SoftpruneError

EXAMPLE = TOPOLOGIES["chain"].example()
DENSE = randomise_(Chain())
GRAPH = read_graph(DENSE, EXAMPLE)
MASKS = {"bn1": torch.arange(8) < 3}
PLAN = make_plan(GRAPH, DENSE, MASKS)
SMALL = apply_plan(PLAN, DENSE)


def sgd(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(network.parameters(), lr=0.1)


def other() -> nn.Module:
    network = Chain()
    network.fc = nn.Linear(6, 7)
    return network


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "inspect: a class": (lambda: sp.inspect(Chain, EXAMPLE), "build the network"),
    "make_plan: no site": (lambda: make_plan(GRAPH, DENSE, {"bn9": torch.ones(8)}), "Got 'bn9'; sites are bn1, bn2"),
    "make_plan: a width": (lambda: make_plan(GRAPH, DENSE, {"bn1": torch.ones(6)}), r"shape \(8,\)\. Got \(6,\)"),
    "apply_plan: a class": (lambda: apply_plan(PLAN, TOPOLOGIES["residual"].build()), "this plan is for"),
    "apply_plan: a shape": (lambda: apply_plan(PLAN, other()), r"'fc\.bias' is \(5,\)\. Got \(7,\)"),
    "from_json: no JSON": (lambda: PrunePlan.from_json(PLAN.to_json()[:-5]), "must be text"),
    "from_json: another document": (lambda: PrunePlan.from_json("[]"), "must be text"),
    "from_json: a change": (
        lambda: PrunePlan.from_json(PLAN.to_json().replace('"macs":', '"macs":1')),
        "does not match its checksum",
    ),
    "verify: a class": (lambda: sp.verify(Chain, DENSE, EXAMPLE), "Got the class Chain"),  # type: ignore[arg-type]
    "verify: an example": (lambda: sp.verify(DENSE, DENSE, torch.randn(2, 5, 8, 8)), "must run on its example"),
    "verify: another network": (lambda: sp.verify(DENSE, randomise_(Chain(), 1), EXAMPLE), "must equal the masked"),
    "cut_and_verify: a shape": (lambda: cut_and_verify(PLAN, other(), MASKS, EXAMPLE), r"Got \(7,\)"),
    "export: a class": (lambda: sp.export.to_onnx(Chain, EXAMPLE, "x.onnx"), "class Chain"),  # type: ignore[arg-type]
    "bench: no network": (lambda: sp.bench.compare_latency(DENSE, None, EXAMPLE), "compact"),  # type: ignore[arg-type]
    "remap: no optimizer": (lambda: sp.remap_optimizer(DENSE, DENSE, SMALL), "pass the wrapped optimizer"),  # type: ignore[arg-type]
    "remap: LBFGS": (
        lambda: sp.remap_optimizer(torch.optim.LBFGS(DENSE.parameters()), DENSE, SMALL),
        "create a new optimizer for the compact network",
    ),
    "remap: no cut": (lambda: sp.remap_optimizer(sgd(DENSE), DENSE, DENSE), "without a plan"),
    "remap: another dense": (lambda: sp.remap_optimizer(sgd(SMALL), SMALL, SMALL), "that `compact` was cut from"),
    "remap: another optimizer": (lambda: sp.remap_optimizer(sgd(Chain()), DENSE, SMALL), "any of its parameters"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_and_nothing_is_changed(name: str) -> None:
    call, says = REFUSED[name]
    before = {key: (id(tensor), tensor.clone()) for key, tensor in DENSE.state_dict(keep_vars=True).items()}
    with pytest.raises(SoftpruneError, match=says):
        call()
    for key, tensor in DENSE.state_dict(keep_vars=True).items():
        assert id(tensor) == before[key][0]
        assert torch.equal(tensor, before[key][1])
