"""BatchNorms of concatenations share the statistics of their parts, with the same outcome."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import lookup_backend
from torch.fx import GraphModule

from softprune.models.densenet import DenseNet
from softprune.train.convolutions.statistics import moments, share_statistics, shared_statistics


@pytest.fixture(autouse=True)
def _compiled_anew() -> None:
    torch.compiler.reset()


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
    network = DenseNet(3, 12, 10).double().train()
    # Three blocks of three layers, and what follows a block: all have channels in common with the layer before.
    _assert_the_same(network, torch.randn(4, 3, 16, 16, dtype=torch.double), sharing=12)


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
