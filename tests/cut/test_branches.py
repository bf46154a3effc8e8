"""Modules that a cut leaves nothing to compute in: one constant stands for each."""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import softprune as sp
from softprune.cut import cut_and_verify, make_plan, remap_optimizer, written
from softprune.cut.selection import read_graph
from softprune.graph import ConstantOutput
from softprune.graph.channels import KINDS
from softprune.graph.modules import Shortcut

IMAGES = torch.randn(2, 3, 8, 8)


class Bottleneck(nn.Sequential):
    """Three convolutions; the last BatchNorm has no activation of its own."""

    def __init__(self, *, in_place: bool = False, stride: int = 1) -> None:
        first = [nn.ReLU(inplace=True)] if in_place else []
        super().__init__(
            *first, nn.Conv2d(6, 4, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True),
            nn.Conv2d(4, 4, 3, stride, 1, groups=4), nn.BatchNorm2d(4), nn.ReLU(inplace=True),
            nn.Conv2d(4, 6, 1), nn.BatchNorm2d(6),
        )  # fmt: skip


class Net(nn.Module):
    """A stem and a residual branch that is added in one of several ways."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how = how
        self.stem, self.bn = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.branch = Bottleneck(in_place=how == "writes its input", stride=2 if how == "shrinks" else 1)
        self.head = nn.Linear(6, 5)
        _draw_norms(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.stem(x))
        y = self.branch(x)
        if self.how == "added in place":
            y += x
        elif self.how == "shrinks":
            y = F.max_pool2d(x, 2) + y
        elif self.how == "called twice":
            y = x + y + self.branch(y)
        else:
            y = x + y
        y = self.head(F.relu(y).mean((2, 3)))
        return y + self.branch[-2].weight.sum() if self.how == "is read by others" else y


SUMS = {
    "x + y": lambda x, y: x + y,
    "relu(x + y)": lambda x, y: F.relu(x + y),
    "in place": lambda x, y: F.relu(y.add_(x), inplace=True),
    "another activation": lambda x, y: F.silu(x + y),
    "scaled": lambda x, y: torch.add(x, y, alpha=2),
    "the input twice": lambda x, y: x + x + y,
    "changes its input": lambda x, y: F.relu(x.add_(y)),
}


class Block(nn.Module):
    """A residual block: a module whose branch is inside."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner = how, Bottleneck()

    def forward(self, x: Tensor) -> Tensor:
        return SUMS[self.how](x, self.inner(x))


def blocks(how: str = "relu(x + y)") -> nn.Module:
    """Return a network whose second block is called `branch`."""
    stem, pool = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)), nn.AdaptiveAvgPool2d(1)
    parts = {"stem": stem, "block": Block("relu(x + y)"), "branch": Block(how), "pool": pool, "flat": nn.Flatten()}
    return _draw_norms(nn.Sequential(OrderedDict(parts, head=nn.Linear(6, 5))))


def _draw_norms(network: nn.Module) -> nn.Module:
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight, module.bias, module.running_mean):
                nn.init.uniform_(tensor, 0.2, 0.8)
    return network


def cut(how: str = "", model: nn.Module | None = None) -> tuple[nn.Module, nn.Module]:
    """Return a network, and its cut without any of the inner channels of the branch."""
    torch.manual_seed(0)
    network = (model or Net(how)).eval()
    graph = read_graph(network, IMAGES)
    masks = {s.name: torch.full((s.width,), not s.name.startswith("branch")) for s in graph.sites}
    plan = make_plan(graph, network, masks)
    compact, _ = cut_and_verify(plan, network, masks, IMAGES)
    found, dense = sp.cost(compact, IMAGES), sp.cost(network, IMAGES)
    assert (plan.macs, plan.params, plan.dense_params) == (found.macs, found.params, dense.params)
    assert written(graph, plan) == found.activations
    return network, compact


@pytest.mark.parametrize(
    ("how", "goes"),
    [("", True), ("added in place", True), ("shrinks", False), ("called twice", False), ("writes its input", False),
     ("is read by others", False)],
)  # fmt: skip
def test_a_branch_without_inputs_is_one_constant(how: str, goes: bool) -> None:
    """The branch itself goes where nothing else can tell; else its layers do, one by one."""
    _, compact = cut(how)
    assert isinstance(compact.branch, ConstantOutput) is goes
    sizes = torch.randn(3, 3, 12, 16)
    assert compact(sizes).shape == (3, 5)  # the constant has the size of what it reads
    if goes:
        assert compact.branch(sizes.to(memory_format=torch.channels_last)).is_contiguous(  # type: ignore[operator]
            memory_format=torch.channels_last
        )


@pytest.mark.parametrize("how", SUMS)
def test_a_block_that_lost_its_branch_is_a_sum_with_a_constant(how: str) -> None:
    _, compact = cut(model=blocks(how))
    removed = how in ("x + y", "relu(x + y)", "in place")
    assert isinstance(compact.branch, Shortcut if removed else Block)
    assert removed or isinstance(compact.branch.inner, ConstantOutput)


@pytest.mark.parametrize("build", [Net, blocks])
def test_a_network_with_a_constant_branch_is_like_any_other(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    """It is saved, read and cut again, and its optimizer goes on."""
    network, compact = cut(model=build())
    again = sp.load(sp.save(compact, tmp_path / "small"), build())
    assert torch.equal(again(IMAGES), compact(IMAGES))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    remap_optimizer(optimizer, network, compact)
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == set(map(id, compact.parameters()))
    graph = read_graph(compact, IMAGES, kinds=KINDS)
    masks = {site.name: torch.arange(site.width) < 4 for site in graph.sites}
    assert masks
    smaller, _ = cut_and_verify(make_plan(graph, compact, masks), compact, masks, IMAGES)
    twice = sp.load(sp.save(smaller, tmp_path / "smaller"), build())
    assert torch.equal(twice(IMAGES), smaller(IMAGES))


def test_a_constant_has_the_attributes_of_its_branch_beside_its_own() -> None:
    """Those around it may read them; they must not change what it computes."""
    network = Net()
    vars(network.branch).update(value=3, transposed=True, geometry="none", place=7)
    _, compact = cut(model=network)
    assert isinstance(compact.branch, ConstantOutput)
    assert compact.branch.place == 7


def test_the_constant_has_the_precision_of_the_branch() -> None:
    """It is computed in float64, and the network has another one."""
    assert {each.dtype for build in (Net, blocks) for each in cut(model=build().half())[1].state_dict().values()} == {
        torch.float16,
        torch.int64,
    }
