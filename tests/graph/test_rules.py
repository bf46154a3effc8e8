"""How channels pass through operators: each rule alone, on networks of a few layers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from comparing import assert_exact
from topologies import randomise_
from torch import Tensor, nn

from softprune.cut import apply_plan
from softprune.graph import ChannelGraph, pointwise, trace
from softprune.graph.operators import OPERATORS, activations


class Between(nn.Module):
    """Two convolutions with a function between them."""

    def __init__(self, between: Callable[[Tensor], Tensor], width: int = 8, read: int = 8) -> None:
        super().__init__()
        self.first, self.bn = nn.Conv2d(3, width, 1), nn.BatchNorm2d(width)
        self.last = nn.Conv2d(read, 2, 1)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.bn(self.first(x))))


def traced(between: Callable[[Tensor], Tensor], width: int = 8, read: int = 8) -> ChannelGraph:
    return trace(Between(between, width, read), torch.randn(2, 3, 8, 8))


def read_classes(graph: ChannelGraph) -> list[int]:
    """For every channel that the last convolution reads, the channel of the BatchNorm in its class; -1: none."""
    norm, last = graph.norms[0], graph.layers[-1]
    place = {int(kind): channel for channel, kind in enumerate(graph.classes[norm.outputs])}
    return [place.get(int(kind), -1) for kind in graph.classes[last.inputs]]


def is_pinned(graph: ChannelGraph) -> list[bool]:
    pinned = set(graph.pinned.tolist())
    return [int(kind) in pinned for kind in graph.classes[graph.norms[0].outputs]]


def test_the_table_tells_the_truth_about_zeros() -> None:
    point = torch.zeros(1, dtype=torch.float64)
    bounded = {"pow", "__and__", "threshold", "clamp", "clamp_min", "clamp_max", "rsqrt", "reciprocal"}
    for name, entry in OPERATORS.items():
        packet = getattr(torch.ops.aten, name, None)
        given = [str(each.type) for each in getattr(packet, packet.overloads()[0])._schema.arguments] if packet else []
        if entry.rule is pointwise and given.count("Tensor") == 1 and name not in bounded:
            known = "logsigmoid" if name == "log_sigmoid" else name
            function = getattr(F, known, None) or getattr(torch, known)
            assert float(function(point)) == pytest.approx(entry.at_zero, abs=0.01), name
    assert all(OPERATORS[name].at_zero == 0 for name in activations())


SAME = list(range(8))


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        (F.relu, SAME),
        (lambda x: F.relu(F.max_pool2d(x, 2)), SAME),
        (lambda x: F.interpolate(F.relu(x), scale_factor=2, mode="bicubic"), SAME),
        (lambda x: F.relu(x).flip(1), SAME[::-1]),
        (lambda x: torch.cat(F.relu(x).chunk(2, 1)[::-1], 1), [4, 5, 6, 7, 0, 1, 2, 3]),
        (lambda x: F.relu(x).permute(0, 2, 3, 1).permute(0, 3, 1, 2), SAME),
        (lambda x: F.relu(x) * torch.sigmoid(x.mean((2, 3), keepdim=True)), SAME),
        (lambda x: F.relu(x).flatten(2).mH.mT.mH.mT.unflatten(2, (8, 8)), SAME),
        (lambda x: F.relu(x.mean((2, 3))).H.T[..., None, None].mH, SAME),
    ],
)
def test_channels_arrive_where_they_are_moved(between: Callable[[Tensor], Tensor], expected: list[int]) -> None:
    graph = traced(between)
    assert read_classes(graph) == expected
    assert not any(is_pinned(graph))


def test_a_pixel_shuffle_ties_the_channels_of_a_block() -> None:
    graph = traced(lambda x: F.pixel_shuffle(F.relu(x), 2), read=2)
    kinds = graph.classes[graph.norms[0].outputs].tolist()
    assert kinds[:4] == kinds[:1] * 4
    assert kinds[4:] == kinds[4:5] * 4
    assert kinds[0] != kinds[4]


@pytest.mark.parametrize(
    ("between", "pinned"),
    [
        (lambda x: F.relu(x)[:, :3], [True] * 3 + [False] * 5),
        (lambda x: torch.cumsum(F.relu(x), 1), [True] * 8),
        (lambda x: torch.softmax(x, 1), [True] * 8),
        (lambda x: F.relu(x)[:, [1, 0, 2]], [True] * 8),
    ],
)
def test_what_depends_on_positions_is_pinned(between: Callable[[Tensor], Tensor], pinned: list[bool]) -> None:
    read = 3 if len(between(torch.zeros(1, 8, 2, 2))[0]) == 3 else 8
    assert is_pinned(traced(between, read=read)) == pinned


def test_equal_pieces_must_keep_equally_many_channels() -> None:
    graph = traced(lambda x: torch.add(*F.relu(x).chunk(2, 1)), read=4)
    (pieces_,) = graph.equal_widths
    assert [len(piece) for piece in pieces_.pieces] == [4, 4]


def test_an_explicit_size_is_unproven_until_a_trial_cut() -> None:
    graph = traced(lambda x: F.relu(x).view(len(x), 2, 4, 8, 8).flatten(1, 2))
    assert graph.unproven_sizes
    assert not traced(F.relu).unproven_sizes


def test_operators_without_a_rule_are_named_and_freeze_what_reaches_them() -> None:
    graph = traced(lambda x: torch.special.i0(x))
    assert any("i0" in name for name in graph.unknown)
    assert all(is_pinned(graph))
    assert "operator without a rule" in graph.frozen[0].reason or "reads it" in graph.frozen[0].reason


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize(
    "between",
    [
        lambda rank: getattr(nn, f"AdaptiveAvgPool{rank}d")(2),
        lambda rank: getattr(nn, f"AdaptiveMaxPool{rank}d")(2),
        lambda rank: getattr(nn, f"AvgPool{rank}d")(2),
        lambda rank: getattr(nn, f"MaxPool{rank}d")(2),
        lambda rank: nn.Upsample(scale_factor=2),
        lambda rank: nn.Upsample(scale_factor=2, mode="linear" if rank == 1 else "trilinear"),
        lambda rank: getattr(nn, f"ConstantPad{rank}d")(1, 0.0),
    ],
)
def test_pooling_between_batchnorm_and_activation_in_one_and_three_dimensions(
    rank: int, between: Callable[[int], nn.Module]
) -> None:
    conv, norm = getattr(nn, f"Conv{rank}d"), getattr(nn, f"BatchNorm{rank}d")
    model = nn.Sequential(conv(2, 4, 1), norm(4), between(rank), nn.ReLU(), conv(4, 2, 1))
    graph = trace(model, torch.randn(2, 2, *(4,) * rank))
    assert [(site.name, site.activation) for site in graph.sites] == [("1", "relu")]


LOWER = torch.ones(8, 8, dtype=torch.bool).tril()


def masked_rows(x: Tensor) -> Tensor:
    return F.relu(x).masked_fill(LOWER, 0.0)


def leaky(x: Tensor) -> Tensor:
    x = F.relu(x)
    return torch.where(x > 1.0, x, 0.1 * x)


@pytest.mark.parametrize("between", [masked_rows, leaky], ids=lambda each: each.__name__)
def test_channels_pass_conditions(between: Callable[[Tensor], Tensor]) -> None:
    graph = traced(between)
    assert not graph.unknown
    assert read_classes(graph) == SAME
    assert not any(is_pinned(graph))
    assert_exact(graph, randomise_(Between(between), 0), {"bn": torch.arange(8) % 2 == 0})


def test_a_fill_other_than_zero_keeps_a_dead_channel() -> None:
    def filled(x: Tensor) -> Tensor:
        return torch.where(LOWER, F.relu(x), 1.0)

    graph, model = traced(filled), randomise_(Between(filled), 0)
    plan = assert_exact(graph, model, {"bn": torch.arange(8) % 2 == 0})
    assert plan.macs == plan.dense_macs


@pytest.mark.parametrize(
    "between",
    [
        lambda x: F.relu(x) / torch.tensor(2.0),
        lambda x: F.relu(x) + torch.tensor(2.0),
        lambda x: torch.maximum(F.relu(x), torch.tensor(0.5)),
        lambda x: F.relu(x) / torch.arange(1.0, 9.0),  # along the width of the image
        lambda x: torch.addcmul(F.relu(x), F.relu(x), F.relu(x).mean((2, 3), keepdim=True), value=0.5),
        lambda x: torch.addcdiv(F.relu(x), F.relu(x), F.relu(x).exp()),
        lambda x: torch.hstack(F.relu(x).chunk(2, 1)),
        lambda x: torch.vstack([F.relu(x), F.relu(x)]) + torch.dstack([F.relu(x)]).repeat(2, 1, 1, 1),
        lambda x: torch.rot90(F.relu(x), 1, (2, 3)),
        lambda x: F.relu(x).unfold(2, 2, 2).mean(-1),
        lambda x: F.max_unpool2d(*F.max_pool2d(F.relu(x), 2, return_indices=True), 2),
        lambda x: F.relu(x) * F.relu(x).logsumexp((2, 3), keepdim=True),
        lambda x: F.instance_norm(F.relu(x)),
    ],
)
def test_a_dead_channel_goes_through_operators(between: Callable[[Tensor], Tensor]) -> None:
    graph, model = traced(between), randomise_(Between(between), 0)
    plan = assert_exact(graph, model, {"bn": torch.arange(8) % 2 == 0})
    assert len(plan.modules["last"].inputs) == 4


class Scaled(nn.Module):
    """A feature map divided by, and added to, integers in buffers: one per channel, and one for all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.bn, self.last = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 2, 1)
        self.register_buffer("each", torch.arange(1, 9).reshape(8, 1, 1))
        self.register_buffer("all", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.bn(self.first(x))) / self.each + self.each + self.all)


def test_buffers_of_integers_are_cut_and_their_values_fold() -> None:
    model = randomise_(Scaled(), 0)
    graph = trace(model, torch.randn(2, 3, 8, 8))
    plan = assert_exact(graph, model, {"bn": torch.arange(8) % 2 == 0})
    assert apply_plan(plan, model).each.ravel().tolist() == [1, 3, 5, 7]  # type: ignore[operator, union-attr]


class WithTensors(nn.Module):
    """A function of a feature map and of a tensor that is a buffer, or an attribute that no one registered."""

    def __init__(self, between: Callable[[Tensor, Tensor], Tensor], tensor: Tensor, *, registered: bool = True) -> None:
        super().__init__()
        self.first, self.bn, self.last = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 2, 1)
        if registered:
            self.register_buffer("tensor", tensor)
        else:
            self.tensor = tensor
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(F.relu(self.bn(self.first(x))), self.tensor))


@pytest.mark.parametrize(
    ("between", "tensor"),
    [
        (lambda x, b: x + (b + b), torch.full((8, 1, 1), 200, dtype=torch.uint8)),
        (lambda x, b: x + (b * torch.tensor(2)), torch.full((8, 1, 1), 200, dtype=torch.uint8)),
        (lambda x, b: x + (5 - b), torch.arange(8, dtype=torch.uint8).reshape(8, 1, 1)),
        (lambda x, b: x + (b + b), torch.ones(8, 1, 1, dtype=torch.bool)),
        (lambda x, b: x + b.long(), torch.arange(8).reshape(8, 1, 1) * 0.7),
        (lambda x, b: x + (b * 1.7).bool(), torch.arange(8).reshape(8, 1, 1)),
        (lambda x, b: (x + 0.7).long().to(b.dtype), torch.zeros(1)),
    ],
)
def test_integers_wrap_around_and_truncate_as_in_the_network(
    between: Callable[[Tensor, Tensor], Tensor], tensor: Tensor
) -> None:
    model = randomise_(WithTensors(between, tensor), 0)
    assert_exact(trace(model, torch.randn(2, 3, 8, 8)), model, {"bn": torch.arange(8) % 2 == 0})


@pytest.mark.parametrize(
    "between",
    [
        lambda x, b: (x / b > -1).to(x.dtype),
        lambda x, b: (x * b.reciprocal().clone() > -1) * x.exp(),
        lambda x, b: (x * (b / b) > -1).to(x.dtype),
    ],
)
def test_a_dead_channel_over_zero_is_not_zero(between: Callable[[Tensor, Tensor], Tensor]) -> None:
    model = randomise_(WithTensors(between, torch.tensor([1.0, 0, 0, 1, 1, 1, 1, 1]).reshape(8, 1, 1)), 0)
    plan = assert_exact(trace(model, torch.randn(2, 3, 8, 8)), model, {"bn": torch.arange(8) % 2 == 0})
    assert plan.modules["last"].inputs == (0, 1, 2, 4, 6)


@pytest.mark.parametrize(
    "between",
    [
        lambda x, weights: F.relu(weights)[0] * x + weights[1] * x.flip(-1),
        lambda x, weights: sum(weight * x for weight in weights.unbind()),
    ],
)
def test_channels_pass_a_sum_with_learned_weights(between: Callable[[Tensor, Tensor], Tensor]) -> None:
    """The fusion of a BiFPN, the mixed operators of DARTS: single numbers of a vector weigh tensors."""
    model = randomise_(WithTensors(between, torch.rand(2)), 0)
    plan = assert_exact(trace(model, torch.randn(2, 3, 8, 8)), model, {"bn": torch.arange(8) % 2 == 0})
    assert len(plan.modules["last"].inputs) == 4


@pytest.mark.parametrize(
    "between",
    [
        lambda x: (F.relu(x) + torch.tensor(1 + 1j)).abs().to(x.dtype),
        lambda x: torch.lerp(F.relu(x), torch.ones_like(x), torch.tensor(0.3, dtype=x.dtype)),
        lambda x: F.relu(x) + torch.add(half := torch.tensor(0.5), half, out=half),
    ],
)
def test_complex_numbers_and_further_tensors_are_left_alone(between: Callable[[Tensor], Tensor]) -> None:
    graph, model = traced(between), randomise_(Between(between), 0)
    assert_exact(graph, model, {site.name: torch.arange(8) % 2 == 0 for site in graph.sites})


def test_a_tensor_that_is_stored_may_change_before_the_cut() -> None:
    model = randomise_(WithTensors(torch.add, torch.tensor(2.0), registered=False), 0)
    graph = trace(model, torch.randn(2, 3, 8, 8))
    model.tensor = torch.tensor(5.0)
    assert_exact(graph, model, {"bn": torch.arange(8) % 2 == 0})


def test_a_gated_linear_unit_ties_the_halves() -> None:
    def gated(x: Tensor) -> Tensor:
        return F.glu(F.relu(x), 1)

    graph = traced(gated, read=4)
    kinds = graph.classes[graph.norms[0].outputs].tolist()
    assert kinds[:4] == kinds[4:]
    assert len(set(kinds)) == 4
    plan = assert_exact(graph, randomise_(Between(gated, read=4), 0), {"bn": torch.arange(8) > 0})
    assert len(plan.modules["last"].inputs) == 3  # a dead value ends the pair, a dead gate does not
    plan = assert_exact(graph, randomise_(Between(gated, read=4), 0), {"bn": torch.arange(8) < 7})
    assert len(plan.modules["last"].inputs) == 4


@pytest.mark.parametrize("options", [{}, {"affine": True}, {"affine": True, "track_running_stats": True}], ids=str)
def test_an_instance_norm_is_cut(options: dict[str, bool]) -> None:
    norm = nn.InstanceNorm2d(8, **options)
    layers = [nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), norm, nn.ReLU(), nn.Conv2d(8, 2, 1)]
    model = randomise_(nn.Sequential(*layers), 0)
    plan = assert_exact(trace(model, torch.randn(2, 3, 8, 8)), model, {"1": torch.arange(8) % 2 == 0})
    compact = apply_plan(plan, model)
    assert compact[3].num_features == compact[5].in_channels == 4  # type: ignore[index, union-attr]


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x).flatten(2).mT
        return self.attention(x, x, x)[0]


def test_torchs_own_attention_keeps_its_width() -> None:
    (frozen,) = trace(Transformer(), torch.randn(2, 3, 8, 8)).frozen
    assert "an attention module that checks their number" in frozen.reason
