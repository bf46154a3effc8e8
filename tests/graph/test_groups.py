"""Which BatchNorms share a mask: sums, linear BatchNorms and streams, found by following their outputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from topologies import GROUPED, TOPOLOGIES, PaddedStreams, conv
from torch import Tensor, nn

import softprune as sp
from softprune.graph import ChannelGraph, trace
from softprune.graph.channels import KINDS

IMAGE = torch.randn(2, 3, 8, 8)


def grouped(model: nn.Module) -> dict[str, tuple[tuple[tuple[str, ...], ...], str]]:
    """Kind -> points and activation, for networks with one group of each kind at most."""
    return {site.kind: (site.points, site.activation) for site in trace(model, IMAGE).grouped}


def members(graph: ChannelGraph) -> list[tuple[str, ...]]:
    return [site.members for site in graph.sites]


@pytest.mark.parametrize(
    ("name", "kind", "points", "activation"),
    [
        ("sum of branches", "sum", (("bn3", "bn1", "same"),), "relu"),
        ("projection shortcut", "sum", (("bn2", "bn3"),), "relu"),  # which begins a stream
        ("without an activation", "linear", (("bn1",),), "none"),
        ("residual stream", "stream", (("bn",), ("bn2",)), "relu"),
        ("linear stream", "stream", (("bn",), ("bn2",)), "none"),
    ],
)
def test_points_and_activations(name: str, kind: str, points: tuple[tuple[str, ...], ...], activation: str) -> None:
    assert grouped(GROUPED[name].build()) == {kind: (points, activation)}


def test_sites_of_one_batchnorm_stay_as_they_are() -> None:
    for name in ("chain", "dense", "depthwise", "u-net"):
        graph = trace(TOPOLOGIES[name].build(), TOPOLOGIES[name].example())
        assert graph.with_kinds(KINDS).sites == graph.sites


def test_a_stream_takes_precedence_over_its_sums_and_its_stem() -> None:
    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.bn = conv(3, 4), nn.BatchNorm2d(4)
            self.conv1, self.bn1 = conv(4, 6), nn.BatchNorm2d(6)
            self.short, self.bn2 = conv(4, 6), nn.BatchNorm2d(6)
            self.conv3, self.bn3 = conv(6, 6), nn.BatchNorm2d(6)
            self.head = conv(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.bn(self.stem(x)))
            x = F.relu(self.bn1(self.conv1(x)) + self.bn2(self.short(x)))
            return self.head(F.relu(x + self.bn3(self.conv3(x))))

    graph = trace(Stage(), IMAGE)
    assert members(graph.with_kinds(["sum"])) == [("bn",), ("bn1", "bn2")]
    assert members(graph.with_kinds(KINDS)) == [("bn",), ("bn1", "bn2", "bn3")]
    stream = graph.with_kinds(["stream"]).sites[1]
    assert stream.points == (("bn1", "bn2"), ("bn3",))


@pytest.mark.parametrize(("name", "offset"), [("after", 0), ("around", 2)])
def test_a_stream_between_zero_channels_enters_the_next_one(name: str, offset: int) -> None:
    graph = trace(GROUPED[f"zero channels {name} a stream"].build(), IMAGE).with_kinds(["stream"])
    first, second = (site for site in graph.sites if site.kind == "stream")
    assert (first.width, first.points, first.entering) == (4, (("bn",), ("bn2",)), ())
    assert (second.width, second.points) == (8, (("bn4",), ("bn6",)))
    assert second.entering == ((offset, (("bn",), ("bn2",))),)
    assert {first.activation, second.activation} == {"relu"}


def zeros_beside(x: Tensor) -> Tensor:
    return torch.zeros(x.shape[0], 4, *x.shape[2:])


@pytest.mark.parametrize(
    ("widen", "width"),
    [
        # Four channels follow the first stage's, and go with them.
        pytest.param(lambda x: torch.cat((x, x.mul(0)), 1), 4, id="mul(0)"),
        pytest.param(lambda x: torch.cat([x, 0.0 * x], dim=1), 4, id="0 *"),
        pytest.param(lambda x: torch.cat([x, torch.zeros_like(x)], 1), 4, id="zeros_like"),
        # Four channels are a literal, as in F.pad.
        pytest.param(lambda x: torch.cat([x, x.new_zeros(len(x), 4, *x.shape[2:])], 1), 6, id="new_zeros"),
        pytest.param(lambda x: torch.cat([x, zeros_beside(x)], 1), 6, id="zeros"),
    ],
)
def test_zeros_that_are_concatenated_are_padding(widen: Callable[[Tensor], Tensor], width: int) -> None:
    class Concatenated(PaddedStreams):
        def widened(self, x: Tensor) -> Tensor:
            return widen(x)

    model = Concatenated(0)
    pruner = sp.SoftPruner(model, IMAGE, site_kinds=["stream"])
    padded = trace(GROUPED["zero channels after a stream"].build(), IMAGE).with_kinds(["stream"])
    assert pruner.sites == padded.sites
    with torch.no_grad():
        for name, dead in {"bn": 0, "bn2": 0, "bn4": 4, "bn6": 4}.items():
            bias = model.get_submodule(name).bias
            bias.fill_(3.0)
            bias[[0, 2]] = bias[[dead, dead + 2]] = -9.0  # type: ignore[index]
    compact = pruner.compact()
    assert (compact.conv2.out_channels, compact.conv6.out_channels) == (2, width)


def test_a_stream_enters_all_that_follow_at_the_sum_of_the_paddings() -> None:
    class Stages(nn.Module):
        def __init__(self, raw: bool = False) -> None:
            super().__init__()
            self.stem, self.bn = conv(3, 2), nn.Identity() if raw else nn.BatchNorm2d(2)
            self.conv1, self.bn1 = conv(2, 4), nn.BatchNorm2d(4)
            self.conv2, self.bn2 = conv(4, 8), nn.BatchNorm2d(8)
            self.head = conv(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.bn(self.stem(x))
            x = F.relu(self.bn1(self.conv1(x)) + F.pad(x, (0, 0, 0, 0, 1, 1)))
            return self.head(F.relu(F.pad(x, (0, 0, 0, 0, 3, 1)) + self.bn2(self.conv2(x))))

    linear, *streams = trace(Stages(), IMAGE).with_kinds(KINDS).sites
    assert (linear.kind, linear.activation, linear.entering) == ("linear", "none", ())
    # What enters is judged as what it enters, so that where activations differ both tails count.
    assert [(site.kind, site.points, site.activation) for site in streams] == [
        ("stream", (("bn1",),), "none"),
        ("stream", (("bn2",),), "none"),
    ]
    assert [site.entering for site in streams] == [((1, (("bn",),)),), ((3, (("bn1",),)), (4, (("bn",),)))]
    # Without the first BatchNorm, no mask makes the channels zero that enter.
    assert grouped(Stages(raw=True)) == {}


def test_streams_that_enter_along_many_paths_are_found_once() -> None:
    class Paths(nn.Module):
        """Two branches a block, each with its own padded shortcut: 2 ** 24 paths from the first to the last stream."""

        def __init__(self, blocks: int = 24) -> None:
            super().__init__()
            widths = range(2, 2 + blocks)
            self.stem = nn.Sequential(conv(3, 2), nn.BatchNorm2d(2))
            self.head = conv(2 + blocks, 2)
            self.left, self.right = (
                nn.ModuleList(nn.Sequential(conv(width, width + 1), nn.BatchNorm2d(width + 1)) for width in widths)
                for _ in range(2)
            )

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for left, right in zip(self.left, self.right, strict=True):
                shortcut = F.pad(x, (0, 0, 0, 0, 0, 1))
                x = (left(x) + shortcut) + (right(x) + shortcut)
            return self.head(x)

    streams = [site for site in trace(Paths(), IMAGE).with_kinds(["stream"]).sites if site.kind == "stream"]
    assert [len(site.entering) for site in streams] == [*range(1, 25)]


def test_what_no_batchnorm_writes_breaks_a_stream() -> None:
    class Raw(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.bn1, self.conv2 = conv(3, 6), nn.BatchNorm2d(6), conv(3, 6)
            self.head = conv(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(F.relu(self.bn1(self.conv1(x)) + self.conv2(x)))

    assert grouped(Raw()) == {}


def test_batchnorms_of_different_width_share_no_mask() -> None:
    class Slice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.bn1 = conv(3, 6), nn.BatchNorm2d(6)
            self.conv2, self.bn2 = conv(3, 3), nn.BatchNorm2d(3)
            self.head = conv(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            first, second = self.bn1(self.conv1(x)).chunk(2, dim=1)
            return self.head(F.relu(torch.cat([first + self.bn2(self.conv2(x)), second], dim=1)))

    assert grouped(Slice()) == {}


def test_a_batchnorm_that_is_also_read_alone_is_in_no_sum() -> None:
    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.bn1 = conv(3, 6), nn.BatchNorm2d(6)
            self.conv2, self.bn2 = conv(3, 6), nn.BatchNorm2d(6)
            self.head, self.side = conv(6, 2), conv(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            left = self.bn1(self.conv1(x))
            return self.head(F.relu(left + self.bn2(self.conv2(x)))) + self.side(left)

    assert "sum" not in grouped(Read())


def test_masks_of_sites_are_masks_of_their_batchnorms() -> None:
    graph = trace(GROUPED["residual stream"].build(), IMAGE).with_kinds(["stream"])
    assert graph.member_masks({"bn": 1, "bn1": 2}) == {"bn": 1, "bn2": 1, "bn1": 2}
    assert graph.site_of == {"bn": "bn", "bn2": "bn", "bn1": "bn1"}
