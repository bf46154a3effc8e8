"""First-order importance: the scores by hand, and what a target compares."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import softprune as sp
from softprune.methods import TaylorPruner

EXAMPLE = torch.zeros(2, 3, 6, 6)


def network():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 4))


def step(model, pruner, optimizer):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(16, 3, 6, 6, generator=generator), torch.randint(4, (16,), generator=generator)
    pruner.loss(F.cross_entropy(model(x), y)).backward()
    change = model[1].bias * model[1].bias.grad + model[1].weight * model[1].weight.grad
    optimizer.step()
    optimizer.zero_grad()
    return change.detach().square()


def test_scores_are_the_squared_change_of_the_loss_summed_over_steps():
    model = network()
    pruner = TaylorPruner(model, EXAMPLE, ratio=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner.attach(optimizer)
    wanted = sum(step(model, pruner, optimizer) for _ in range(3))
    torch.testing.assert_close(pruner.scores(model)["1"], wanted)
    kept = pruner.decide()["1"]
    assert kept.sum() == 4
    assert wanted[kept].min() >= wanted[~kept].max()


@pytest.mark.parametrize("scope", ["global", "layer"])
def test_a_target_compares_channels_over_the_network_or_within_layers(scope):
    model = network()
    with torch.no_grad():
        model[4].weight.mul_(1e-3)  # all of these matter less
        model[4].bias.add_(0.5)
        model[7].weight.mul_(1e-2)
    pruner = TaylorPruner(model, EXAMPLE, target={"channels": 0.5}, scope=scope)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    pruner.attach(optimizer)
    step(model, pruner, optimizer)
    pruner.decide()
    kept = [int(mask.sum()) for mask in pruner.masks().values()]
    assert sum(kept) == 12
    assert (kept == [4, 8]) == (scope == "layer")
    assert sp.cost(pruner.compact(), EXAMPLE).macs < sp.cost(network(), EXAMPLE).macs
