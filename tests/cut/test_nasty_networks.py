"""Realistic ways to write a forward() that are easy to get wrong: each is exact, or frozen for a true reason."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from comparing import assert_exact, random_masks
from topologies import conv, pooled, randomise_
from torch import Tensor, nn

from softprune.cut import floor_masks, make_plan
from softprune.cut.selection import read_graph
from softprune.graph import ChannelGraph


class Nasty(nn.Module):
    """conv1-bn1-relu, a middle part that subclasses write, conv2-bn2-relu, mean, linear."""

    middle_width = 8

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(3, 8), nn.BatchNorm2d(8)
        self.more()
        self.conv2, self.bn2 = conv(self.middle_width, 6), nn.BatchNorm2d(6)
        self.fc = nn.Linear(6, 5)

    def more(self) -> None:
        """Further layers."""

    def middle(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(F.relu(self.bn1(self.conv1(x))))
        return self.fc(pooled(F.relu(self.bn2(self.conv2(x)))))


def check(model: nn.Module, example: Any = None, masks: int = 4) -> ChannelGraph:
    """Exact under several masks, all dead among them; the graph for further questions. The model stays as it was."""
    randomise_(model)
    before = copy.deepcopy(model.state_dict())
    graph = read_graph(model, torch.randn(2, 3, 8, 8) if example is None else example)
    if graph.sites:
        for seed in range(masks):
            assert_exact(graph, model, random_masks(graph, seed, deaths=0.3 * (seed % 2)))
        assert_exact(graph, model, floor_masks(graph))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    return graph


def site_names(graph: ChannelGraph) -> set[str]:
    return {site.name for site in graph.sites}


def reason(graph: ChannelGraph, name: str) -> str:
    return next(frozen.reason for frozen in graph.frozen if frozen.name == name)


PRUNED: dict[str, Callable[..., Tensor]] = {
    "relu in place": lambda self, x: F.relu(x, inplace=True),
    "adds to itself in place": lambda self, x: x.add_(1.0).mul_(0.5),
    "doubles": lambda self, x: x + x,
    "a constant tensor": lambda self, x: x * torch.tensor(0.5) + torch.tensor(1.0),
    "shape arithmetic": lambda self, x: x.view(x.size(0), x.size(1), -1).view(x.shape),
    "tokens and back": lambda self, x: x.flatten(2).transpose(1, 2).transpose(1, 2).reshape(x.shape),
    "channels last and back": lambda self, x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    "flip": lambda self, x: x.flip(1).flip(2),
    "spatial roll": lambda self, x: x.roll(1, 2),
    "spatial pad": lambda self, x: F.pad(x, (1, 1, 1, 1)),
    "pad with ones": lambda self, x: F.pad(x, (1, 1, 1, 1), value=1.0),
    "reflection pad": lambda self, x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "softmax over space": lambda self, x: x.flatten(2).softmax(-1).view_as(x),
    "normalised by its mean": lambda self, x: x / (1 + x.mean((2, 3), keepdim=True)),
    "cast there and back": lambda self, x: x.to(torch.float64).to(x.dtype),
    "half of the pixels": lambda self, x: x[:, :, ::2, 1::2],
    "one image row": lambda self, x: x[:, :, 2:3],
    "max and mean pools added": lambda self, x: F.max_pool2d(x, 2) + F.avg_pool2d(x, 2),
    "bilinear": lambda self, x: F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False),
    "power": lambda self, x: (x + 1).pow(2).sqrt(),
    "stacked and summed": lambda self, x: torch.stack([x, 2 * x], 0).sum(0),
    "dropout": lambda self, x: F.dropout(x, 0.5, self.training),
    "stretched to itself": lambda self, x: x.mean((2, 3), keepdim=True).expand_as(x) * x,
    "relu by comparison": lambda self, x: (x - 0.3) * (x > 0.3),
    "cast like itself": lambda self, x: x.double().type_as(x),
    "zeros like itself": lambda self, x: torch.cat([x, torch.zeros_like(x)], 1).chunk(2, 1)[0],
    "tiled over space": lambda self, x: x.tile(1, 1, 2, 2),
    "joined by another name": lambda self, x: torch.concatenate([x, x], 2),
    "between two": lambda self, x: torch.lerp(x, F.silu(x), 0.3),
    "where the largest stand": lambda self, x: F.max_pool2d(x, 2, return_indices=True)[1].to(x.dtype),
    "sorted": lambda self, x: x.sort(2)[0] + x.sort(2)[1].to(x.dtype),
    "summed up over space": lambda self, x: x.cumsum(2),
    "shuffled by torch": lambda self, x: F.channel_shuffle(x, 2),
    "squeezed": lambda self, x: x * F.adaptive_avg_pool2d(x, 1).squeeze()[..., None, None],
    "index over space": lambda self, x: x[:, :, [4, 0, 2]],
    "index over batch and space": lambda self, x: x[torch.arange(len(x))[:, None], :, torch.tensor([[4, 0]])].transpose(
        1, 2
    ),
    "a new tensor of its dtype": lambda self, x: x * x.new_full((1, 1, x.shape[2], 1), 2.0),
    "index_select over space": lambda self, x: x.index_select(-1, torch.tensor([4, 0, 4])),
    "three branches": lambda self, x: sum([F.relu(x), F.silu(x), F.avg_pool2d(x, 3, 1, 1)]),
}


@pytest.mark.parametrize("name", PRUNED)
def test_pruned_and_exact(name: str) -> None:
    network = type("Network", (Nasty,), {"middle": PRUNED[name]})
    graph = check(network())
    assert site_names(graph) == {"bn1", "bn2"}
    assert not graph.unknown


FROZEN: dict[str, tuple[Callable[..., Tensor], str]] = {
    "literal view": (lambda self, x: x.view(-1, 2, 4, 8, 8).flatten(1, 2), "literal size"),
    "literal unflatten": (lambda self, x: x.unflatten(1, (8, 1)).flatten(1, 2), "literal size"),
    "literal split": (lambda self, x: torch.cat(x.split(4, 1)[::-1], 1), "literal size"),
    "uneven split": (lambda self, x: torch.cat(x.split([3, 5], 1), 1), "unequal pieces"),
    "literal slice": (lambda self, x: torch.cat([x[:, 4:], x[:, :4]], 1), "literal size"),
    "an index": (lambda self, x: x[:, [7, 6, 5, 4, 3, 2, 1, 0]], "index"),
    "channels summed by an index": (lambda self, x: x.index_add(1, torch.arange(8).flip(0), x), "index_add"),
    "channel roll": (lambda self, x: x.roll(1, 1), "hard-coded"),
    "unbind": (lambda self, x: torch.stack(x.unbind(1), 1), "hard-coded"),
    "mean over channels": (lambda self, x: x - x.mean(1, keepdim=True), "combines channels"),
    "max over channels": (lambda self, x: x - x.amax(1, keepdim=True), "combines channels"),
    "softmax over channels": (lambda self, x: x.softmax(1), "softmax"),
    "group norm": (lambda self, x: F.group_norm(x, 2), "group_norm"),
    "layer norm": (lambda self, x: F.layer_norm(x, x.shape[1:]), "layer_norm"),
    "matrix product": (
        lambda self, x: (x.flatten(2) @ x.flatten(2).transpose(1, 2) @ x.flatten(2)).view_as(x),
        "matmul",
    ),
    "einsum": (lambda self, x: torch.einsum("bchw,bdhw->bcd", x, x).mean(2)[..., None, None] * x, "bmm|einsum"),
    "a matrix outside a layer": (
        lambda self, x: F.linear(x.permute(0, 2, 3, 1), torch.eye(8).to(x)).permute(0, 3, 1, 2),
        "outside a layer",
    ),
    "a blur": (lambda self, x: F.conv2d(x, torch.ones(8, 1, 1, 1).to(x), groups=8), "not a parameter of its module"),
    "sum over channels": (lambda self, x: x * x.sum(1, keepdim=True), "combines channels"),
    "channel statistics": (lambda self, x: x / (x.std(1, keepdim=True) + 0.1), "combines channels"),
    "a constant per channel": (
        lambda self, x: x * torch.linspace(0.5, 1, 8).view(1, 8, 1, 1).to(x),
        "constant|literal|linspace",
    ),
    "written into through a view": (lambda self, x: _overwrite(x), "overwrites|hard-coded"),
}


def _overwrite(x: Tensor) -> Tensor:
    y = x * 1.0
    y[:, :3] += 1.0
    return y


@pytest.mark.parametrize("name", FROZEN)
def test_frozen_for_a_true_reason(name: str) -> None:
    middle, why = FROZEN[name]
    network = type("Network", (Nasty,), {"middle": middle})
    graph = check(network())
    assert site_names(graph) == {"bn2"}
    assert re.search(why, reason(graph, "bn1")), reason(graph, "bn1")


class Literal(Nasty):
    """Only the first three channels are bound by the literal; the other five may go."""

    def middle(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, :3] * 2, x[:, 3:]], 1)


def test_channels_beyond_a_literal_slice_can_go() -> None:
    graph = check(Literal())
    assert site_names(graph) == {"bn1", "bn2"}


class TwoReaders(nn.Module):
    """One BatchNorm and activation, read by two convolutions that need different channels."""

    def __init__(self, second: Callable[[Tensor], Tensor] = F.relu) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(3, 8), nn.BatchNorm2d(8)
        self.left, self.bn2 = conv(8, 6), nn.BatchNorm2d(6)
        self.right, self.bn3 = nn.Conv2d(8, 6, 1), nn.BatchNorm2d(6)
        self.second = second
        self.fc = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x))
        left = F.relu(self.bn2(self.left(F.relu(x))))
        right = F.relu(self.bn3(self.right(self.second(x))))
        return self.fc(pooled(left * right))


def test_a_batchnorm_read_twice() -> None:
    assert site_names(check(TwoReaders())) == {"bn1", "bn2", "bn3"}


def test_a_batchnorm_read_by_different_activations() -> None:
    graph = check(TwoReaders(F.silu))
    assert site_names(graph) == {"bn2", "bn3"}
    assert "different activations" in reason(graph, "bn1")
    graph = check(TwoReaders(torch.sigmoid))
    assert "sigmoid(0) = 0.5" in reason(graph, "bn1")


class OwnConv(Nasty):
    """A layer in the middle."""

    def more(self) -> None:
        self.conv = conv(8, 8)


class Tied(OwnConv):
    """Two layers have one weight."""

    def more(self) -> None:
        super().more()
        self.also = conv(8, 8)
        self.also.weight = self.conv.weight

    def middle(self, x: Tensor) -> Tensor:
        return self.also(F.relu(self.conv(x)))


class Renamed(OwnConv):
    """Its weight has a second name, which nothing calls."""

    def more(self) -> None:
        super().more()
        self.conv.kernel = self.conv.weight

    def middle(self, x: Tensor) -> Tensor:
        return self.conv(x)


class SharedBuffer(Nasty):
    """A buffer of two modules, with which channels are multiplied."""

    def more(self) -> None:
        self.one, self.other = nn.Identity(), nn.Identity()
        self.one.register_buffer("scale", torch.rand(8))
        self.other.register_buffer("scale", self.one.scale)

    def middle(self, x: Tensor) -> Tensor:
        return x * self.one.scale.view(-1, 1, 1) + self.other.scale.view(-1, 1, 1)


OTHER_USES: dict[str, tuple[type[Nasty], str]] = {
    "a layer called as a function, too": (
        type("Functional", (OwnConv,), {"middle": lambda s, x: F.conv2d(s.conv(x), s.conv.weight, padding=1)}),
        "'conv.weight' is also used outside its module",
    ),
    "statistics read by forward()": (
        type("Read", (Nasty,), {"middle": lambda s, x: x + s.bn1.running_mean.view(-1, 1, 1)}),
        "'bn1.running_mean' is also used outside its module",
    ),
    "a weight of two layers": (Tied, "'conv.weight' is also 'also.weight'"),
    "a weight with a second name": (Renamed, "'conv.weight' is also 'conv.kernel'"),
    "a buffer of two modules": (SharedBuffer, "'one.scale' is also 'other.scale'"),
}


@pytest.mark.parametrize("name", OTHER_USES)
def test_what_is_used_in_two_places_stays_whole(name: str) -> None:
    network, why = OTHER_USES[name]
    graph = check(network())
    assert site_names(graph) == {"bn2"}
    assert why in reason(graph, "bn1")


class Subclass(nn.Conv2d):
    """Pads by itself, as TensorFlow does: its own padding says nothing about its output. It has a gain of its own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.gain = nn.Parameter(torch.rand(self.out_channels, 1, 1))

    def forward(self, input: Tensor) -> Tensor:
        height, across = input.shape[2:]
        x = F.pad(input, (across % 2, 1, height % 2, 1))
        return self.gain * F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Subclassed(Nasty):
    def more(self) -> None:
        self.own = Subclass(8, 8, 3, stride=2, groups=2)

    def middle(self, x: Tensor) -> Tensor:
        return F.relu(self.own(x)) if self.training else self.own(x)


def test_a_subclass_with_a_forward_of_its_own() -> None:
    assert site_names(check(Subclassed())) == {"bn1", "bn2"}


class Geometry(nn.Module):
    """A layer of odd geometry, followed by another one, so that its death leaves a shape to be kept."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(3, 8), nn.BatchNorm2d(8)
        self.layer, self.bn2 = layer, nn.BatchNorm2d(6)
        self.head = nn.Conv2d(6, 2, 1)
        self.side = nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        side = self.side(x)
        x = F.relu(self.bn1(self.conv1(x)))
        return self.head(F.relu(self.bn2(self.layer(x)))), side


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(8, 6, 3, padding="same"),
        nn.Conv2d(8, 6, (2, 4), padding="same", dilation=(2, 1)),
        nn.Conv2d(8, 6, 3, padding="valid", stride=2),
        nn.Conv2d(8, 6, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(8, 6, 3, padding=2, padding_mode="circular", dilation=2, bias=False),
        nn.Conv2d(8, 6, (1, 3), padding=(2, 0), stride=(2, 3)),
        nn.ConvTranspose2d(8, 6, 3, stride=2, padding=1, output_padding=1),
        nn.ConvTranspose2d(8, 6, (3, 2), stride=(1, 3), padding=(0, 1), output_padding=(0, 2), dilation=(2, 1)),
        nn.ConvTranspose2d(8, 6, 2, stride=2, groups=2),
        nn.ConvTranspose2d(8, 6, 1),
    ],
    ids=str,
)
def test_odd_geometry_survives_death(layer: nn.Module) -> None:
    model = Geometry(layer)
    graph = check(model)
    assert site_names(graph) == {"bn1", "bn2"}
    dead = {"bn1": torch.zeros(8, dtype=torch.bool)}
    assert_exact(graph, model, dead)


def test_a_parameter_that_shifts_every_channel() -> None:
    class Shift(Nasty):
        def more(self) -> None:
            self.shift = nn.Parameter(torch.randn(8))
            self.register_buffer("offset", torch.randn(8, 1, 1))

        def middle(self, x: Tensor) -> Tensor:
            return x + self.shift[None, :, None, None] + self.offset

    assert site_names(check(Shift())) == {"bn1", "bn2"}


@pytest.mark.parametrize("amount", [0.1, 1e-3])
def test_randomness_in_evaluation_is_refused(amount: float) -> None:
    """Also where it is fainter than what a trial cut may be off by."""

    class Noisy(Nasty):
        def middle(self, x: Tensor) -> Tensor:
            return x + amount * torch.randn_like(x)

    with pytest.raises(ValueError, match=r"same outputs for the same input.*Remove randomness"):
        check(Noisy())


@pytest.mark.parametrize("padding", [0, 1])
def test_constants_that_reach_a_depthwise_convolution(padding: int) -> None:
    class Constants(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.bn1 = conv(3, 8), nn.BatchNorm2d(8)
            self.mix, self.bn2 = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)
            self.depthwise, self.bn3 = conv(8, 8, groups=8, padding=padding), nn.BatchNorm2d(8)
            self.fc, self.side = nn.Linear(8, 5), nn.Linear(3, 5)

        def forward(self, x: Tensor) -> Tensor:
            side = self.side(pooled(x))
            x = F.hardswish(self.bn2(self.mix(F.relu(self.bn1(self.conv1(x))))))
            return side + self.fc(pooled(F.relu(self.bn3(self.depthwise(x)))))

    model = Constants()
    graph = check(model)
    dead = torch.zeros(8, dtype=torch.bool)
    some = torch.arange(8) % 3 == 0
    for first, second, third in ((dead, ~dead, some), (dead, some, ~some), (some, ~dead, dead)):
        assert_exact(graph, model, {"bn1": first, "bn2": second, "bn3": third})


def test_a_scale_and_shift_outside_layers_folds() -> None:
    """timm's LearnableAffineBlock: what a dropped channel becomes is known, and the next 1x1 can do without it."""

    class Affine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.bn1 = conv(3, 8), nn.BatchNorm2d(8)
            self.scale, self.shift = nn.Parameter(torch.tensor([1.5])), nn.Parameter(torch.tensor([0.0]))
            self.conv2, self.bn2 = nn.Conv2d(8, 6, 1, bias=False), nn.BatchNorm2d(6)
            self.fc = nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.bn1(self.conv1(x))) * self.scale + self.shift
            return self.fc(pooled(F.relu(self.bn2(self.conv2(x)))))

    for shift in (0.0, 0.7):
        model = Affine()
        model.shift.data.fill_(shift)
        graph = check(model)
        plan = assert_exact(graph, model, {"bn1": torch.arange(8) < 3})
        assert len(plan.modules["conv1"].outputs) == 3
        assert plan.modules["conv2"].folded == (shift != 0)
    model.scale.data.fill_(0.0)  # as some start: it will not stay zero, so nothing goes for it
    plan = assert_exact(graph, model, {})
    assert len(plan.modules["conv1"].outputs) == 8


class Reading(Nasty):
    """A middle part that reads more tensors than one: what else it reads stays whole, and the data can be pruned."""

    def more(self) -> None:
        self.where, self.one = nn.Conv2d(8, 2, 1), nn.Conv2d(8, 1, 1)
        self.six, self.side = nn.Linear(8, 6), conv(8, 8)

    def grid(self, x: Tensor) -> Tensor:
        return torch.tanh(self.where(x)).permute(0, 2, 3, 1)

    def slope(self, x: Tensor) -> Tensor:
        return pooled(self.one(x)).mean(0)


MIDDLES: dict[str, Callable[[Reading, Tensor], Tensor]] = {
    "a learned grid": lambda self, x: F.grid_sample(x, self.grid(x), align_corners=False),
    "a learned transform": lambda self, x: F.grid_sample(
        x, F.affine_grid(self.six(pooled(x)).view(-1, 2, 3), list(x.shape), align_corners=False), align_corners=False
    ),
    "a computed slope": lambda self, x: F.prelu(-x, self.slope(x)),
    "a mask stretched like its data": lambda self, x: x * torch.sigmoid(self.one(x)).expand_as(x),
    "a number stretched like a map": lambda self, x: x * self.slope(x).expand_as(x),
    "the shape of another tensor": lambda self, x: x.flatten(2).view_as(self.side(x)),
    "the type of another tensor": lambda self, x: x.type_as(self.side(x)),
    "the device of another tensor": lambda self, x: x.to(self.side(x)),
}


@pytest.mark.parametrize("name", MIDDLES)
def test_the_data_is_pruned_and_what_else_is_read_stays(name: str) -> None:
    model = type("Odd", (Reading,), {"middle": MIDDLES[name]})()
    graph = check(model, masks=2)
    assert site_names(graph) == {"bn1", "bn2"}
    half = {"bn1": torch.arange(8) % 2 == 0, "bn2": torch.arange(6) < 3}
    cuts = make_plan(graph, model, half).modules
    assert cuts["conv1"].outputs == cuts["conv2"].inputs == (0, 2, 4, 6)
