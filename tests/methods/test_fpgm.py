"""FPGM: its distances against brute force, and masked gradients."""

import math
from typing import Any

import pytest
import torch
from method_networks import Chain, batch, sgd, train
from torch import Tensor, nn

from softprune.methods import FpgmPruner
from softprune.methods.ranking import summed_distances


def brute_force(filters: Tensor) -> list[float]:
    rows = filters.double().tolist()
    return [sum(math.dist(row, other) for other in rows) for row in rows]


def test_distances_against_brute_force() -> None:
    torch.manual_seed(0)
    filters = torch.randn(12, 27)
    filters[3] = filters[7]
    filters[4] = filters[5] = 0
    expected = brute_force(filters)
    torch.testing.assert_close(summed_distances(filters), torch.tensor(expected))
    assert summed_distances(torch.zeros(5, 9)).equal(torch.zeros(5))
    near = 1000 + 0.01 * filters  # far from zero, where float32 and products of rows lose what lies between them
    torch.testing.assert_close(summed_distances(near), torch.tensor(brute_force(near)), rtol=1e-5, atol=0)


def test_the_filters_nearest_to_all_others_are_zeroed() -> None:
    torch.manual_seed(0)
    model = Chain(16)
    conv = model[0]
    assert isinstance(conv, nn.Conv2d)
    distances = brute_force(conv.weight.detach().flatten(1))
    pruner = FpgmPruner(model, batch()[0], ratio_dist=0.4)
    sgd(pruner)
    zeroed = torch.nonzero(~pruner.masks()["1"]).flatten().tolist()
    assert zeroed == sorted(sorted(range(16), key=distances.__getitem__)[:6])
    assert (conv.weight[zeroed] == 0).all()


def test_gradients_of_zeroed_filters_are_masked_and_momentum_is_not() -> None:
    torch.manual_seed(0)
    model = Chain(8)
    conv = model[0]
    assert isinstance(conv, nn.Conv2d)
    pruner = FpgmPruner(model, batch()[0], ratio_dist=0.5)
    optimizer = sgd(pruner)
    zeroed = ~pruner.masks()["1"]
    train(pruner, optimizer)
    assert (conv.weight[zeroed] == 0).all()
    assert (conv.weight[~zeroed] != 0).any()
    # The authors mask .grad alone: momentum from before goes on moving the filter.
    optimizer.state[conv.weight]["momentum_buffer"].fill_(1.0)
    train(pruner, optimizer, 1)
    assert (conv.weight[zeroed] != 0).all()


@pytest.mark.parametrize(("evaluation", "closed"), [("strict", True), ("authors", False)])
def test_training_does_without_the_constants_that_the_cut_removes(evaluation: Any, closed: bool) -> None:
    model, (images, _) = Chain(8), batch()
    nn.init.constant_(model[1].bias, 0.1)  # type: ignore[arg-type]
    pruner = FpgmPruner(model, images, ratio_dist=0.5, evaluation=evaluation)
    sgd(pruner)
    outputs = model.train()[1](model[0](images))
    assert bool((outputs[:, ~pruner.masks()["1"]] == 0).all()) is closed
