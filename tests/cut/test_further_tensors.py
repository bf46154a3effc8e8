"""Operators that read more than their data: what else they read stays whole, and the data can be pruned."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from comparing import assert_exact, random_masks
from topologies import conv, pooled, randomise_
from torch import Tensor, nn

from softprune.cut import make_plan
from softprune.cut.selection import read_graph


class Network(nn.Module):
    """conv1-bn1-relu, a middle part that reads more tensors than one, conv2-bn2-relu, mean, linear."""

    middle: Callable[[Network, Tensor], Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(3, 8), nn.BatchNorm2d(8)
        self.where, self.one = nn.Conv2d(8, 2, 1), nn.Conv2d(8, 1, 1)
        self.nine, self.six = nn.Linear(8, 9), nn.Linear(8, 6)
        self.side = conv(8, 8)
        self.kernel = nn.Parameter(torch.rand(1, 1, 1, 3))
        self.conv2, self.bn2 = conv(8, 6), nn.BatchNorm2d(6)
        self.fc = nn.Linear(6, 5)

    def grid(self, x: Tensor) -> Tensor:
        return torch.tanh(self.where(x)).permute(0, 2, 3, 1)

    def slope(self, x: Tensor) -> Tensor:
        return pooled(self.one(x)).mean(0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(F.relu(self.bn1(self.conv1(x))))
        return self.fc(pooled(F.relu(self.bn2(self.conv2(x)))))


def blurred(x: Tensor, kernel: Tensor) -> Tensor:
    width, pads = x.shape[1], [size // 2 for size in kernel.shape[2:]]
    return F.conv2d(x, kernel.expand(width, -1, -1, -1), padding=pads, groups=width)


MIDDLES: dict[str, Callable[[Network, Tensor], Tensor]] = {
    "a learned grid": lambda self, x: F.grid_sample(x, self.grid(x), align_corners=False),
    "a learned transform": lambda self, x: F.grid_sample(
        x, F.affine_grid(self.six(pooled(x)).view(-1, 2, 3), list(x.shape), align_corners=False), align_corners=False
    ),
    "a blur of one wide dimension": lambda self, x: blurred(x, self.kernel),
    "a computed blur": lambda self, x: blurred(x, self.nine(pooled(x)).mean(0).view(1, 1, 3, 3)),
    "a computed slope": lambda self, x: F.prelu(-x, self.slope(x)),
    "a mask stretched like its data": lambda self, x: x * torch.sigmoid(self.one(x)).expand_as(x),
    "a number stretched like a map": lambda self, x: x * self.slope(x).expand_as(x),
    "the shape of another tensor": lambda self, x: x.flatten(2).view_as(self.side(x)),
    "the type of another tensor": lambda self, x: x.type_as(self.side(x)),
    "the device of another tensor": lambda self, x: x.to(self.side(x)),
}


@pytest.mark.parametrize("name", MIDDLES)
def test_the_data_is_pruned_and_what_else_is_read_stays(name: str) -> None:
    model = randomise_(type("Odd", (Network,), {"middle": MIDDLES[name]})())
    graph = read_graph(model, torch.randn(2, 3, 8, 8))
    assert [site.name for site in graph.sites] == ["bn1", "bn2"]
    for seed in range(4):
        assert_exact(graph, model, random_masks(graph, seed, deaths=0.3 * (seed % 2)))
    half = {"bn1": torch.arange(8) % 2 == 0, "bn2": torch.arange(6) < 3}
    cuts = make_plan(graph, model, half).modules
    assert cuts["conv1"].outputs == cuts["conv2"].inputs == (0, 2, 4, 6)


def test_a_count_given_as_a_tensor_freezes() -> None:
    class Repeated(Network):
        def middle(self, x: Tensor) -> Tensor:
            counts = torch.tensor([1, 0, 2, 1, 1, 1, 1, 1])
            return x.repeat_interleave(counts, 1, output_size=8)

    model = randomise_(Repeated())
    graph = read_graph(model, torch.randn(2, 3, 8, 8))
    assert [site.name for site in graph.sites] == ["bn2"]
    assert "repeat_interleave" in next(frozen.reason for frozen in graph.frozen)
    assert_exact(graph, model, random_masks(graph, 0))
