"""BatchNorms of concatenations share the statistics of their parts, with the same outcome."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import lookup_backend
from torch.fx import GraphModule

from softprune import SoftPruner
from softprune.fused.training.statistics import moments, share_statistics, shared_statistics
from softprune.masks import MaskConfig
from softprune.models.densenet import DenseNet


@pytest.fixture(autouse=True)
def _compiled_anew() -> None:
    torch.compiler.reset()


class _InPlace(nn.Module):
    """A part is overwritten behind its concatenation, or a concatenation behind it, or a view of a part."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.conv, self.one, self.two = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(8), nn.BatchNorm2d(4)
        self.again = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        part = self.conv(x)
        stream = torch.cat([x, part], 1)
        if self.kind == "part":
            nn.functional.relu(part, inplace=True)
        elif self.kind == "stream":
            stream.mul_(2)
        elif self.kind == "view":
            part[:, :2] += 1
        result = self.one(stream).relu() + torch.cat([self.two(part)] * 2, 1)
        return result + self.again(torch.cat([part, x], 1))


class _WithoutGradients(nn.Module):
    """The first to read a part takes no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.teacher, self.student = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        part = self.conv(x)
        with torch.no_grad():
            target = self.teacher(part).relu()
        return self.student(part).relu() * target


class _Layers(nn.Module):
    """Normalises what it gets twice, then that beside something else, then something nobody else normalises."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.once = nn.BatchNorm2d(4, **options)
        self.twice = nn.BatchNorm2d(4, momentum=0.3, eps=1e-3, **options)
        self.together = nn.BatchNorm2d(8, **options)
        self.single = nn.BatchNorm2d(8, **options)

    def forward(self, x: Tensor) -> Tensor:
        other = self.once(x).relu() + self.twice(x).sigmoid()
        both = self.together(torch.cat([x, other], 1))
        return self.single(both.tanh())


def _sharing(found: list[int]) -> Callable[[GraphModule, Any], Any]:
    def backend(graph: GraphModule, inputs: Any) -> Any:
        graph = copy.deepcopy(graph)
        found.append(len(shared_statistics(graph)))
        share_statistics(graph)
        graph.graph.lint()
        graph.recompile()
        return lookup_backend("aot_eager")(graph, inputs)

    return backend


def _assert_the_same(network: nn.Module, images: Tensor, sharing: int) -> None:
    """Three steps of both: results, gradients, running statistics and their count."""
    reference = copy.deepcopy(network)
    found: list[int] = []
    compiled = torch.compile(network, backend=_sharing(found), dynamic=False)
    for _ in range(3):
        left, right = images.clone().requires_grad_(), images.clone().requires_grad_()
        got, want = compiled(left), reference(right)
        torch.testing.assert_close(got, want)
        weights = torch.randn_like(want)
        (got * weights).sum().backward()
        (want * weights).sum().backward()
        torch.testing.assert_close(left.grad, right.grad)
    for (name, parameter), other in zip(network.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, msg=lambda text, name=name: f"{name}: {text}")
    for (name, buffer), other in zip(network.named_buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(buffer, other, msg=lambda text, name=name: f"{name}: {text}")
    assert found == [sharing]


@pytest.mark.parametrize("options", [{}, {"track_running_stats": False}])
def test_results_gradients_and_running_statistics_stay(options: dict[str, bool]) -> None:
    torch.manual_seed(0)
    network = _Layers(**options).double().train()
    for parameter in network.parameters():
        nn.init.normal_(parameter)
    # Of four BatchNorms three read x; the last has its input to itself.
    _assert_the_same(network, torch.randn(3, 4, 5, 5, dtype=torch.double), sharing=3)


def test_a_densenet_takes_every_statistic_once() -> None:
    torch.manual_seed(0)
    network = DenseNet(2, 12, 10).double().train()
    # Three blocks of two layers, and what follows a block: all have channels in common with the layer before.
    _assert_the_same(network, torch.randn(4, 3, 16, 16, dtype=torch.double), sharing=9)


@pytest.mark.parametrize(("kind", "sharing"), [("nothing", 3), ("part", 0), ("stream", 2), ("view", 0)])
def test_what_is_overwritten_shares_nothing(kind: str, sharing: int) -> None:
    torch.manual_seed(0)
    _assert_the_same(_InPlace(kind).double().train(), torch.randn(3, 4, 5, 5, dtype=torch.double), sharing)


def test_gradients_pass_through_statistics_that_were_first_read_without_them() -> None:
    torch.manual_seed(0)
    _assert_the_same(_WithoutGradients().double().train(), torch.randn(3, 4, 5, 5, dtype=torch.double), 2)


@pytest.mark.parametrize("gate", ["both", "none"])
def test_masked_batch_norms_share_and_gate_their_statistics(gate: str) -> None:
    torch.manual_seed(0)
    networks = [DenseNet(1, 12, 10).double().train() for _ in range(2)]
    networks[1].load_state_dict(networks[0].state_dict())
    images = torch.randn(4, 3, 16, 16, dtype=torch.double)
    found: list[int] = []
    results = []
    for network, backend in zip(networks, (None, _sharing(found)), strict=True):
        pruner = SoftPruner(network, images, strength=1e-3, masks=MaskConfig(gate_statistics=gate), seed=3)
        call = network if backend is None else torch.compile(network, backend=backend, dynamic=False)
        for _ in range(2):
            loss = pruner.loss(call(images).square().sum())
            loss.backward()
        gradients = [parameter.grad for parameter in network.parameters()]
        results.append([loss.detach(), *gradients, *network.buffers()])
    torch.testing.assert_close(results[1], results[0])
    assert sum(found) == 6  # hooks part the graph; the norms are all in one piece of it


def test_values_far_from_zero_keep_their_variance() -> None:
    torch.manual_seed(0)
    images = torch.randn(8, 4, 6, 6) + 1000
    wide = images.double()
    want = torch.stack([wide.mean((0, 2, 3)), wide.var((0, 2, 3), correction=0)])
    torch.testing.assert_close(moments(images).double(), want, rtol=1e-5, atol=0)


@pytest.mark.parametrize("options", [{"affine": False}, {}])
def test_what_is_not_in_training_or_has_no_weight_stays(options: dict[str, bool]) -> None:
    torch.manual_seed(0)
    network = _Layers(**options).double().train(mode="affine" in options)
    found: list[int] = []
    images = torch.randn(3, 4, 5, 5, dtype=torch.double)
    reference = copy.deepcopy(network)
    got = torch.compile(network, backend=_sharing(found), dynamic=False)(images)
    torch.testing.assert_close(got, reference(images))
    assert found == [0]
