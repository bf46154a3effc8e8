"""How channels pass through reductions and products: what is added up over them can be cut, and so can its weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from comparing import assert_exact
from topologies import randomise_
from torch import Tensor, nn

from softprune.costs import cost
from softprune.cut import apply_plan
from softprune.cut.selection import read_graph
from softprune.graph import trace
from softprune.graph.sites import KINDS

IMAGE = torch.randn(2, 3, 8, 8)
HALF = {"bn": torch.arange(8) % 2 == 0}

Between = Callable[[Tensor, Tensor], Tensor]


class Weighted(nn.Module):
    """A function of a feature map and of a tensor between two convolutions."""

    def __init__(self, between: Between, weight: Tensor | None = None) -> None:
        super().__init__()
        self.first, self.bn, self.last = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 2, 1)
        self.weight: Tensor
        if isinstance(weight, nn.Parameter):
            self.weight = weight
        else:
            self.register_buffer("weight", torch.ones(8, 8) if weight is None else weight)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(F.relu(self.bn(self.first(x))), self.weight))


def learned(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.rand(*shape))


def context(x: Tensor, _: Tensor) -> Tensor:
    """Space pooled with weights of a softmax, as in GCNet."""
    weights = x.sum(1, keepdim=True).flatten(2).softmax(-1)  # (N, 1, HW)
    return x + (x.flatten(2) @ weights.mT).unsqueeze(-1)


def adjacent(x: Tensor, w: Tensor) -> Tensor:
    """Halves of the channels, each with its own graph over space, added up, as in ST-GCN."""
    graphs = torch.stack([w, w.T])
    return torch.einsum("nkctv,kvw->nctw", x.view(len(x), 2, -1, 8, 8), graphs).repeat(1, 2, 1, 1)


@pytest.mark.parametrize(
    ("between", "weight", "read", "kept"),
    [
        (lambda x, w: (x.permute(0, 2, 3, 1) @ w).permute(0, 3, 1, 2), learned(8, 8), 8, 4),
        (lambda x, w: F.linear(x.permute(0, 2, 3, 1), w).permute(0, 3, 1, 2), learned(8, 8), 8, 4),
        (lambda x, w: torch.einsum("bchw,oc->bohw", x, w), learned(8, 8), 8, 4),
        (lambda x, w: x * torch.einsum("bchw, c -> bhw", x, w)[:, None], learned(8), 4, 4),
        (lambda x, w: x * (x.mean((2, 3)) @ w).view(-1, 1, 1, 1), learned(8), 4, 4),
        (lambda x, w: torch.einsum("...cw,wv->...cv", x, w), learned(8, 8), 4, 8),
        (lambda x, w: torch.einsum("bchw,w", x, x.new_ones(8))[..., None], None, 4, 8),
        (lambda x, w: x * torch.einsum("w...c,c", x.permute(3, 0, 2, 1), w)[:, None], learned(8), 4, 4),
        (lambda x, w: x @ w, learned(8, 8), 4, 8),
        (lambda x, w: w @ x, learned(8, 8), 4, 8),
        (lambda x, w: x @ w, None, 4, 8),
        (lambda x, w: w @ x, None, 4, 8),
        (lambda x, w: x * torch.einsum("bchw,bchw->bhw", x, x.sigmoid())[:, None], None, 4, 8),
        (lambda x, w: x * torch.einsum("bchw,bc->bch", x, x.mean((2, 3)))[..., None], None, 4, 8),
        (lambda x, w: F.normalize(x), None, 4, 8),
        (lambda x, w: x * F.normalize(x.flatten(2), dim=2).view_as(x), None, 4, 8),
        (context, None, 4, 8),
        (adjacent, None, 4, 8),
    ],
)
def test_what_is_added_up_over_channels_can_be_cut(
    between: Between, weight: Tensor | None, read: int, kept: int
) -> None:
    model = randomise_(Weighted(between, weight), 0)
    graph = trace(model, IMAGE)
    assert not graph.unknown
    plan = assert_exact(graph, model, HALF)
    assert len(plan.modules["last"].inputs) == read
    assert len(plan.parameters["weight"].kept if "weight" in plan.parameters else range(8)) == kept
    counted = cost(apply_plan(plan, model), IMAGE)
    assert (counted.macs, counted.params) == (plan.macs, plan.params)
    assert cost(model, IMAGE).macs == plan.dense_macs


def twice(x: Tensor, w: Tensor) -> Tensor:
    """One matrix whose rows and columns both read the channels."""
    return ((x.permute(0, 2, 3, 1) @ w) + F.linear(x.permute(0, 2, 3, 1), w)).permute(0, 3, 1, 2)


@pytest.mark.parametrize(
    ("between", "weight", "reason"),
    [
        (lambda x, w: x * (x.flatten(2) @ x.flatten(2).mT).mean(2)[..., None, None], None, "with each other"),
        (lambda x, w: x * torch.linalg.vector_norm(x + 1, -1, dim=1, keepdim=True), None, "combines channels"),
        (lambda x, w: x * F.linear(F.normalize(x.mean((2, 3))), F.normalize(w)).sum(), learned(5, 8), "is fixed"),
        (lambda x, w: (x.permute(0, 2, 3, 1) @ w.sin()).permute(0, 3, 1, 2), learned(8, 8), "no parameter"),
        (lambda x, w: x * torch.einsum("bccw->bw", x)[:, None, None], None, "two tensors"),
        (twice, learned(8, 8), "with each other"),
        (lambda x, w: (x.reshape(-1, 1, 64) @ w.new_ones(64, 64)).view_as(x), None, "samples in one dimension"),
    ],
)
def test_frozen_where_no_dimension_of_the_weight_can_be_cut(
    between: Between, weight: Tensor | None, reason: str
) -> None:
    (frozen,) = trace(Weighted(between, weight), IMAGE).frozen
    assert reason in frozen.reason


def of_own(x: Tensor) -> Tensor:
    """Heads in a dimension of their own."""
    return x.unflatten(1, (2, -1)).flatten(3)


def with_samples(x: Tensor) -> Tensor:
    """Heads and samples in one dimension, as in BoTNet."""
    return x.reshape(2 * len(x), -1, x.shape[2:].numel())


class Attention(nn.Module):
    """Queries and keys are added up over their channels, in two heads."""

    def __init__(self, heads: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3))
        self.last = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(part(x)) for part in (self.q, self.k, self.v))
        return self.last((v @ (q.mT @ k).softmax(-1).mT).reshape(len(x), -1, *x.shape[2:]))


@pytest.mark.parametrize("heads", [of_own, with_samples])
def test_a_dead_query_ends_its_key(heads: Callable[[Tensor], Tensor]) -> None:
    model = randomise_(Attention(heads), 0)
    alive = torch.arange(8) % 4 > 0  # the same channel of both heads is dead
    plan = assert_exact(trace(model, IMAGE), model, {"q.1": alive})
    assert plan.modules["q.0"].outputs == plan.modules["k.0"].outputs == (1, 2, 3, 5, 6, 7)
    assert len(plan.modules["v.0"].outputs) == 8
    plan = assert_exact(trace(model, IMAGE), model, {"v.1": alive})
    assert plan.modules["v.0"].outputs == plan.modules["last"].inputs == (1, 2, 3, 5, 6, 7)


def test_heads_of_all_samples_in_a_literal_size_are_frozen_by_a_trial_cut() -> None:
    model = randomise_(Attention(lambda x: x.reshape(-1, 4, x.shape[2:].numel())), 0)
    graph = read_graph(model, IMAGE)
    assert not graph.sites
    assert all("literal size" in frozen.reason for frozen in graph.frozen)


class AddedUp(nn.Module):
    """The sum of two BatchNorms, read by an activation and by a sum over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)) for _ in range(2))
        self.last = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x) + self.other(x)
        return self.last(F.relu(x)) * x.sum(1, keepdim=True)


def test_a_sum_over_channels_is_a_reader_without_an_activation() -> None:
    graph = trace(AddedUp(), IMAGE).with_kinds(KINDS)
    assert [(site.kind, site.activation) for site in graph.sites] == [("stream", "none")]
    assert_exact(graph, randomise_(AddedUp(), 0), {graph.sites[0].name: HALF["bn"]})


@pytest.mark.parametrize("options", [{}, {"affine": True}, {"affine": True, "track_running_stats": True}], ids=str)
def test_an_instance_norm_is_cut(options: dict[str, bool]) -> None:
    norm = nn.InstanceNorm2d(8, **options)
    layers = [nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), norm, nn.ReLU(), nn.Conv2d(8, 2, 1)]
    model = randomise_(nn.Sequential(*layers), 0)
    plan = assert_exact(trace(model, IMAGE), model, {"1": HALF["bn"]})
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
    (frozen,) = trace(Transformer(), IMAGE).frozen
    assert "an attention that checks their number" in frozen.reason
