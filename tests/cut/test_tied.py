"""Sites with a depthwise convolution between them: what all of them keep is enough."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import softprune as sp
from softprune.cut import coupled_sites
from softprune.cut.selection import read_graph

EXAMPLE = torch.randn(2, 3, 8, 8)


class _Block(nn.Module):
    """An inverted residual: widened, filtered channel by channel, narrowed again."""

    def __init__(self, groups: int = 24, *, between: bool = False, shuffled: bool = False) -> None:
        super().__init__()
        self.expand, self.bn1 = nn.Conv2d(3, 24, 1, bias=False), nn.BatchNorm2d(24)
        self.filter, self.bn2 = nn.Conv2d(24, 24, 3, padding=1, groups=groups, bias=False), nn.BatchNorm2d(24)
        self.again, self.bn3 = nn.Conv2d(24, 24, 3, padding=1, groups=24, bias=False), nn.BatchNorm2d(24)
        self.project, self.head = nn.Conv2d(24, 8, 1), nn.Linear(8, 5)
        self.between, self.shuffled = between, shuffled

    def forward(self, x: Tensor) -> Tensor:
        wide = F.relu6(self.bn1(self.expand(x)))
        if self.shuffled:
            wide = wide.flip(1)
        y = F.relu6(self.bn2(self.filter(F.pad(wide, (1, 0, 1, 0)))[:, :, 1:, 1:]))
        if self.between:
            y = y + wide
        y = F.relu6(self.bn3(self.again(y)))
        return self.head(self.project(y).mean((2, 3)))


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ({}, (("bn1", "bn2", "bn3"),)),
        ({"groups": 12}, (("bn2", "bn3"),)),  # two channels mix
        ({"groups": 1}, (("bn2", "bn3"),)),
        ({"between": True}, (("bn1", "bn2"),)),  # either of them is enough for the sum
        ({"shuffled": True}, (("bn2", "bn3"),)),  # another order
    ],
)
def test_lines_are_found(options: dict[str, Any], lines: tuple[tuple[str, ...], ...]) -> None:
    assert coupled_sites(read_graph(_Block(**options), EXAMPLE)) == lines


class _Stream(nn.Module):
    """Two BatchNorms whose sum, one site, is filtered channel by channel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.bn1 = nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6)
        self.second, self.bn2 = nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6)
        self.filter, self.bn3 = nn.Conv2d(6, 6, 3, groups=6), nn.BatchNorm2d(6)
        self.project = nn.Conv2d(6, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.first(x)) + self.bn2(self.second(x)))
        return self.project(F.relu(self.bn3(self.filter(y))))


def test_the_sum_of_a_sites_batchnorms_is_coupled_to_what_filters_it() -> None:
    graph = read_graph(_Stream(), EXAMPLE, kinds={"sum"})
    assert coupled_sites(graph) == (("bn1", "bn3"),)


def _disjoint_(model: nn.Module) -> None:
    """Each BatchNorm of the line would keep other channels."""
    with torch.no_grad():
        for number, bn in enumerate((model.bn1, model.bn2, model.bn3)):
            dead = torch.arange(24) // 8 != number
            bn.weight.copy_(torch.where(dead, 0.1, 1.0))
            bn.bias.copy_(torch.where(dead, -3.0 - torch.arange(24) / 100, 0.5))


def _width(network: nn.Module) -> int:
    return int(network.project.weight.shape[1])


@pytest.mark.parametrize(("least", "width"), [(0, 1), (5, 5)])
def test_soft_masks_leave_enough_in_common(least: int, width: int) -> None:
    torch.manual_seed(0)
    model = _Block()
    pruner = sp.SoftPruner(model, EXAMPLE, min_channels=least)
    _disjoint_(model)
    assert _width(pruner.compact()) == width
    masks = pruner.masks()
    assert int((masks["bn1"] & masks["bn2"] & masks["bn3"]).sum()) == width
    # An average, masked or not, decides by its own weights.
    for average in (copy.deepcopy(model), sp.SoftPruner(_Block(), EXAMPLE).detach()):
        _disjoint_(average)
        with torch.no_grad():
            average.bn1.bias[20:] = 0.4
        assert _width(pruner.compact(average)) == width
    assert torch.equal(pruner.masks()["bn1"], masks["bn1"])
