"""FPGM: its distances against brute force, its two criteria, and masked gradients."""

import math
from typing import Any

import pytest
import torch
from method_networks import Chain, batch, sgd, train
from torch import Tensor, nn

from softprune.methods import FpgmPruner
from softprune.methods.zeroing import summed_distances


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


@pytest.mark.parametrize(("ratio_norm", "ratio_dist"), [(0.0, 0.4), (0.3, 0.1), (0.25, 0.25)])
def test_norm_first_then_distance_among_the_survivors(ratio_norm: float, ratio_dist: float) -> None:
    torch.manual_seed(0)
    model = Chain(16)
    conv = model[0]
    assert isinstance(conv, nn.Conv2d)
    filters = conv.weight.detach().flatten(1).clone()
    pruner = FpgmPruner(model, batch()[0], ratio_norm=ratio_norm, ratio_dist=ratio_dist)
    sgd(pruner)
    by_norm = sorted(range(16), key=lambda i: float(filters[i].norm()))[: int(16 * ratio_norm)]
    left = [i for i in range(16) if i not in by_norm]
    distances = dict(zip(left, brute_force(filters[left]), strict=True))
    by_distance = sorted(left, key=distances.__getitem__)[: int(16 * ratio_dist)]
    zeroed = torch.nonzero(~pruner.masks()["1"]).flatten().tolist()
    assert zeroed == sorted(by_norm + by_distance)
    assert (conv.weight[zeroed] == 0).all()


@pytest.mark.parametrize("masked", [True, False])
def test_gradients_of_zeroed_filters_are_masked_and_momentum_is_not(masked: bool) -> None:
    torch.manual_seed(0)
    model = Chain(8)
    conv = model[0]
    assert isinstance(conv, nn.Conv2d)
    pruner = FpgmPruner(model, batch()[0], ratio_dist=0.5, mask_gradients=masked)
    optimizer = sgd(pruner)
    zeroed = ~pruner.masks()["1"]
    train(pruner, optimizer)
    assert bool((conv.weight[zeroed] == 0).all()) is masked
    assert (conv.weight[~zeroed] != 0).any()
    # The authors mask .grad alone: momentum from before goes on moving the filter.
    optimizer.state[conv.weight]["momentum_buffer"].fill_(1.0)
    train(pruner, optimizer, 1)
    assert (conv.weight[zeroed] != 0).all()


@pytest.mark.parametrize(
    ("options", "closed"), [({}, True), ({"mask_gradients": False}, False), ({"evaluation": "authors"}, False)]
)
def test_training_does_without_the_constants_that_the_cut_removes(options: dict[str, Any], closed: bool) -> None:
    model, (images, _) = Chain(8), batch()
    nn.init.constant_(model[1].bias, 0.1)  # type: ignore[arg-type]
    pruner = FpgmPruner(model, images, ratio_dist=0.5, **options)
    sgd(pruner)
    outputs = model.train()[1](model[0](images))
    assert bool((outputs[:, ~pruner.masks()["1"]] == 0).all()) is closed
