"""Which additions and ReLUs a convolution takes along."""

import pytest
import torch
import torch.nn.functional as F
from fused_networks import SideBySide, assert_same, operators
from torch import Tensor, nn

from softprune.fused.inference import fuse


class _Sums(nn.Module):
    """Convolutions around additions, one shape for all; `kind` says what is added to what."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 6, 1)
        self.scale = nn.Parameter(torch.randn(6, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        one = self.first(x)
        if self.kind == "itself":
            return F.relu(one + one)
        if self.kind == "twice":
            return F.relu(one + x) + one
        if self.kind == "broadcast":
            return F.relu(one + self.scale)
        if self.kind == "alpha":
            return F.relu(torch.add(one, x, alpha=2))
        if self.kind == "number":
            return F.relu(one + 1.5)
        if self.kind == "both":
            return F.relu(one + self.second(x))
        if self.kind == "sum is read":
            total = one + x
            return F.relu(total) + total
        if self.kind == "in place":
            x = x * 1.0
            x += one
            return F.relu_(x)
        raise AssertionError(self.kind)


def test_additions_that_stay() -> None:
    torch.manual_seed(0)
    kinds = ("itself", "twice", "broadcast", "alpha", "number", "sum is read")
    model = SideBySide(_Sums(kind) for kind in kinds).eval().double()
    images = [torch.randn(2, 6, 5, 7, dtype=torch.float64) for _ in kinds]
    made = fuse(model, tuple(images), dynamic_batch=False)
    assert operators(made)["conv2d_relu"] == 0
    assert_same(model, made, *images)


@pytest.mark.parametrize("kind", ["both", "in place"])
def test_additions_that_a_convolution_takes_along(kind: str) -> None:
    torch.manual_seed(0)
    model, images = _Sums(kind).eval().double(), torch.randn(2, 6, 5, 7, dtype=torch.float64)
    made = fuse(model, images, dynamic_batch=False)
    assert operators(made)["conv2d_relu"] == 1
    assert_same(model, made, images)


def test_convolutions_of_each_channel_by_itself_stay() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.ReLU()).eval().double()
    images = torch.randn(2, 8, 6, 6, dtype=torch.float64)
    made = fuse(model, images)
    assert operators(made) == {"conv2d": 1, "relu": 1}
    assert_same(model, made, images)
