"""Methods that rank channels: the score of each, and targets that are met at their cut."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from method_networks import Chain, batch, sgd, train
from topologies import TOPOLOGIES
from torch import Tensor, nn

import softprune as sp
from softprune import models
from softprune.methods import REGISTRY, FpgmPruner, L1Pruner, Pruner, RandomPruner, TaylorPruner
from softprune.methods.ranking import summed_distances

# --- L1 ---------------------------------------------------------------------------------------------------------------


def test_the_smallest_sums_of_weights_go() -> None:
    torch.manual_seed(0)
    model = Chain(8)
    conv = model[0]
    assert isinstance(conv, nn.Conv2d)
    sums = conv.weight.detach().abs().sum((1, 2, 3))
    keep = L1Pruner(model, batch()[0], ratio=0.5).decide()["1"]
    assert sorted(sums[keep].tolist()) == sorted(sums.tolist())[4:]


# Share per stage and 1-based convolutions that stay whole (the stem is 1), and what METHODS.md says goes.
PUBLISHED = {
    "A": ((0.1, 0.1, 0.1), {16, 20, 38, 54}, 10.4, 9.3),
    "B": ((0.6, 0.3, 0.1), {16, 18, 20, 34, 38, 54}, 27.6, 13.8),
}


def test_resnet56_of_the_paper() -> None:
    torch.manual_seed(0)
    pruner = L1Pruner(models.resnet56_a(), torch.zeros(2, 3, 32, 32), exclude="bn")
    for shares, whole, macs, params in PUBLISHED.values():
        for stage in range(3):
            for block in range(9):
                share = 0.0 if 2 + 2 * (9 * stage + block) in whole else shares[stage]
                pruner.ratios[f"stages.{stage}.{block}.bn1"] = share
        plan = pruner.plan()
        assert 100 * (1 - plan.macs / plan.dense_macs) == pytest.approx(macs, abs=0.05)
        assert 100 * (1 - plan.params / plan.dense_params) == pytest.approx(params, abs=0.1)


# --- Taylor -----------------------------------------------------------------------------------------------------------


EXAMPLE = torch.zeros(2, 3, 6, 6)


def small_network():
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
    model = small_network()
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
    model = small_network()
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
    assert sp.cost(pruner.compact(), EXAMPLE).macs < sp.cost(small_network(), EXAMPLE).macs


# --- random -----------------------------------------------------------------------------------------------------------


def test_the_lot_depends_on_the_seed_alone() -> None:
    def drawn(seed: int) -> list[list[bool]]:
        pruner = RandomPruner(Chain(64, 64), batch()[0], ratio=0.5, seed=seed)
        return [mask.tolist() for mask in pruner.decide().values()]

    assert drawn(0) == drawn(0)
    assert drawn(0) != drawn(1)
    first, second = drawn(0)
    assert first != second


# --- FPGM -------------------------------------------------------------------------------------------------------------


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


# --- equal scores, coupled sites, targets -----------------------------------------------------------------------------


class Net(nn.Sequential):
    """Wide enough that one channel costs less than one percent."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 40), (40, 60), (60, 50)):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(50, 5))


def test_coupled_sites_that_chose_other_channels_keep_some_in_common() -> None:
    topology = TOPOLOGIES["depthwise"]
    pruner = REGISTRY["sfp"](topology.build(), topology.example(), min_channels=2)
    masks = pruner.masks()
    for group in pruner.coupled:
        masks |= {name: torch.arange(len(masks[name])) % len(group) == turn for turn, name in enumerate(group)}
    row = pruner.site_masks.row(masks)
    made = pruner.site_masks.by_site(pruner.site_masks.filled(row.clone(), row.float()))
    for group in pruner.coupled:
        assert int(torch.stack([made[name] for name in group]).all(0).sum()) == 2
        assert all(bool((made[name] | ~masks[name]).all()) for name in group)


def build(method: str, **settings: Any) -> Pruner:
    torch.manual_seed(0)
    return REGISTRY[method](Net(), batch()[0], **settings)


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("l1", {"macs": 0.5}),
        ("fpgm", {"params": "40%"}),
        ("sfp", {"macs": 0.5}),
        ("slimming", {"flops": 0.7}),
        ("random", {"channels": 90}),
    ],
)
def test_a_target_is_met_at_the_cut(method: str, target: dict[str, Any]) -> None:
    pruner = build(method, target=target, round_to=1)
    optimizer = sgd(pruner)
    for epoch in range(2):
        train(pruner, optimizer, 2, first=2 * epoch)
        pruner.end_epoch(epoch)
    pruner.decide()
    status = pruner.status
    assert status is not None
    assert 0.98 * status.limit <= status.cost <= status.limit
    cost = sp.cost(pruner.compact(), batch()[0][:1])
    if "macs" in target:
        assert cost.macs == status.cost
    if "flops" in target:
        assert 2 * cost.macs == status.cost


def grouped() -> nn.Sequential:
    convolutions = [nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 3, groups=16), nn.Conv2d(64, 64, 1), nn.Conv2d(64, 64, 1)]
    return nn.Sequential(*(layer for conv in convolutions for layer in (conv, nn.BatchNorm2d(64), nn.ReLU())))


@pytest.mark.parametrize("make", [Net, grouped])
@pytest.mark.parametrize("target", [0.3, 0.5, 0.8])
def test_layers_lose_the_same_share(make: type[nn.Module], target: float) -> None:
    torch.manual_seed(0)
    masks = L1Pruner(make(), batch()[0], target={"macs": target}, round_to=1).decide()
    shares = [float(mask.float().mean()) for mask in masks.values()]
    assert max(shares) - min(shares) < 0.1


@pytest.mark.parametrize(("width", "options", "multiple"), [(32, {}, 8), (16, {}, 1), (32, {"round_to": 1}, 1)])
def test_a_target_keeps_multiples_where_layers_are_wide(width: int, options: dict[str, Any], multiple: int) -> None:
    model = nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 5, 3))
    x = torch.randn(2, 3, 8, 8)
    pruner = REGISTRY["l1"](model, x, target={"macs": 0.5}, **options)
    assert pruner.round_to == multiple
    assert REGISTRY["l1"](pruner.detach(), x).round_to == 1
