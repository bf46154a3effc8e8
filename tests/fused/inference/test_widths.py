"""Odd widths are filled up where only convolutions read them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from fused_networks import SideBySide, assert_same
from torch import Tensor, nn

import softprune as sp
from softprune import models
from softprune.fused.inference import fuse


def test_a_cut_network_has_whole_widths_between_its_convolutions() -> None:
    torch.manual_seed(0)
    model = models.VGG([[16, 16], [32, 32]])
    images = torch.randn(2, 3, 32, 32)
    pruner = sp.SoftPruner(model, images)
    with torch.no_grad():
        for number, site in enumerate(pruner.sites):
            model.get_submodule(site.name).bias[: 1 + 2 * number] = -3.0
            model.get_submodule(site.name).weight[: 1 + 2 * number] = 0.1
    compact = pruner.compact().eval()
    before = copy.deepcopy(compact.state_dict())
    made = fuse(compact, images)
    weights = [tensor for tensor in made.state_dict().values() if tensor.dim() == 4]
    # All but the last, which a linear layer reads, and the colours.
    assert sum(weight.shape[0] % 8 > 0 for weight in weights) == 1
    assert sum(weight.shape[1] % 8 > 0 for weight in weights) == 1
    assert_same(compact, made, images)
    for key, value in compact.state_dict().items():
        assert torch.equal(value, before[key]), "the network itself is left alone"


class _Readers(nn.Module):
    """A convolution of odd width with one reader that is not a convolution of all of it."""

    def __init__(self, reader: str) -> None:
        super().__init__()
        self.reader = reader
        self.first = nn.Conv2d(8, 13, 1)
        self.second = nn.Conv2d(13, 8, 1)
        self.each = nn.Conv2d(13, 13, 3, groups=13)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        y = self.second(x).mean((2, 3))
        if self.reader == "sum":
            return y.sum(1) + x.sum((1, 2, 3))
        if self.reader == "groups":
            return y.sum(1) + self.each(x).sum((1, 2, 3))
        if self.reader == "shortcut":
            return y.sum(1) + F.relu(self.first(x[:, :8]) + x).sum((1, 2, 3))
        if self.reader == "sigmoid":
            return y.sum(1) + self.second(torch.sigmoid(x)).sum((1, 2, 3))
        return y.sum(1) + self.second(F.max_pool2d(x, 2)).sum((1, 2, 3))


@pytest.mark.parametrize(
    ("readers", "width"),
    [(("sum", "groups", "shortcut", "sigmoid"), 13), (("pool",), 16)],
    ids=["others", "convolutions alone"],
)
def test_widths_stay_where_not_only_convolutions_read_them(readers: tuple[str, ...], width: int) -> None:
    torch.manual_seed(0)
    model = SideBySide(_Readers(reader) for reader in readers).eval().double()
    images = [torch.randn(2, 8, 6, 6, dtype=torch.float64) for _ in readers]
    made = fuse(model, tuple(images))
    first = [t for t in made.state_dict().values() if t.dim() == 4 and t.shape[1] == 8 and t.shape[0] > 8]
    assert len(first) >= len(readers)
    assert {weight.shape[0] for weight in first} == {width}
    assert_same(model, made, *images)
