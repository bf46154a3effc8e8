"""Targets of the methods that rank channels: met at their cut."""

from typing import Any

import pytest
import torch
from method_networks import batch, sgd, train
from topologies import TOPOLOGIES
from torch import nn

import softprune as sp
from softprune.errors import ConfigError
from softprune.methods import REGISTRY, Pruner
from softprune.methods.ranking import filled, lowest


class Net(nn.Sequential):
    """Wide enough that one channel costs less than one percent."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 40), (40, 60), (60, 50)):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(50, 5))


def test_the_lowest_scores_are_dropped_and_of_equal_ones_the_last() -> None:
    assert sorted(lowest(torch.tensor([1.0, 0.0, 1.0, 1.0]), 2).tolist()) == [1, 3]
    assert len(lowest(torch.ones(3), 0)) == 0


def test_coupled_sites_that_chose_other_channels_keep_some_in_common() -> None:
    topology = TOPOLOGIES["depthwise"]
    pruner = REGISTRY["sfp"](topology.build(), topology.example(), min_channels=2)
    masks = pruner.masks()
    for group in pruner.coupled:
        masks |= {name: torch.arange(len(masks[name])) % len(group) == turn for turn, name in enumerate(group)}
    made = pruner.site_masks.by_site(filled(pruner, masks, {name: mask.float() for name, mask in masks.items()}))
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


def test_layers_lose_the_same_share() -> None:
    masks = build("l1", target={"macs": 0.5}, round_to=1).decide()
    shares = [float(mask.float().mean()) for mask in masks.values()]
    assert max(shares) - min(shares) < 0.1


@pytest.mark.parametrize("method", ["l1", "fpgm"])
def test_a_ratio_beside_a_target_and_an_unreachable_target_are_refused(method: str) -> None:
    option = "ratio_dist" if method == "fpgm" else "ratio"
    with pytest.raises(ConfigError, match="and a `target` exclude each other"):
        build(method, target={"macs": 0.5}, **{option: 0.3})
    model = Net()
    with pytest.raises(ConfigError, match="within reach"):
        REGISTRY[method](model, batch()[0], target={"macs": 1e-5})
    assert type(model[1]) is nn.BatchNorm2d
    with pytest.raises(ConfigError, match="`latency_batch` needs a `target`"):
        build(method, latency_batch=2)


@pytest.mark.parametrize(("width", "options", "multiple"), [(32, {}, 8), (16, {}, 1), (32, {"round_to": 1}, 1)])
def test_a_target_keeps_multiples_where_layers_are_wide(width: int, options: dict[str, Any], multiple: int) -> None:
    model = nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 5, 3))
    x = torch.randn(2, 3, 8, 8)
    pruner = REGISTRY["l1"](model, x, target={"macs": 0.5}, **options)
    assert pruner.round_to == multiple
    assert REGISTRY["l1"](pruner.detach(), x).round_to == 1
