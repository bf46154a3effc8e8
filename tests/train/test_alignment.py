"""Convolutions of odd widths in a compiled step: widened, with the same outcome."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo import lookup_backend
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from softprune.train.alignment import widened


class _Convs(nn.Module):
    """Odd widths on both sides, biases, strides, dilations, groups, shortcuts and branches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 12, 3, padding=1)
        self.bn = nn.BatchNorm2d(12)
        self.wide = nn.Conv2d(12, 16, 3, stride=2, padding=1, bias=False)
        self.point = nn.Conv2d(16, 13, 1)
        self.same = nn.Conv2d(13, 13, 3, padding="same", dilation=2)
        self.grouped = nn.Conv2d(13, 26, 3, groups=13)
        self.even = nn.Conv2d(26, 16, 1)
        self.even2 = nn.Conv2d(16, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.first(x)))
        x = self.point(self.wide(x))
        x = x + F.relu(self.same(x))
        x = self.even2(self.even(self.grouped(x)))
        return x.mean((2, 3))


def _gradients(network: nn.Module, call: Any, images: Tensor) -> list[Tensor]:
    images = images.clone().requires_grad_()
    result = call(images)
    result.square().sum().backward()
    return [result.detach(), images.grad, *(parameter.grad for parameter in network.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_results_and_gradients_stay_and_widths_are_multiples(memory_format: torch.memory_format) -> None:
    torch.manual_seed(0)
    eager = _Convs().double().train()
    wider = copy.deepcopy(eager).to(memory_format=memory_format)
    images = torch.randn(2, 3, 12, 12, dtype=torch.double)
    widths: list[tuple[int, ...]] = []

    def inner(graph: GraphModule, inputs: Any) -> Any:
        for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default):
            if node.args[-1] == 1:
                widths.append(tuple(node.args[1].meta["val"].shape[:2]))
        return make_boxed_func(graph.forward)

    def backend(graph: GraphModule, inputs: Any) -> Any:
        before = graph.code
        wide = widened(graph)
        assert wide is not None
        assert graph.code == before
        return aot_autograd(fw_compiler=inner)(wide, inputs)

    compiled = torch.compile(wider, backend=backend, dynamic=False)
    want = _gradients(eager, eager, images)
    got = _gradients(wider, compiled, images.contiguous(memory_format=memory_format))
    for mine, theirs in zip(got, want, strict=True):
        assert mine.shape == theirs.shape
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    # The grouped one and the one of even widths stay; the first one's three colours stay, too.
    assert widths == [(16, 3), (16, 16), (16, 16), (16, 16), (16, 32), (8, 16)]


W, B = torch.randn(13, 12, 3, 3, dtype=torch.double), torch.randn(13, dtype=torch.double)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.conv2d(x, W, B, padding=1),
        lambda x: F.conv2d(x, W, B, dilation=2),
        lambda x: F.conv2d(x, W, padding="same"),
        lambda x: F.conv2d(x, W, bias=None, padding=1),
        lambda x: F.conv2d(weight=W, input=x, stride=2, bias=B),
        lambda x: F.conv2d(x, W, B, (2, 1), (1, 0), 1, 1),
        lambda x: F.conv2d(x, W).view(-1),
        lambda x: (lambda y: y.as_strided(y.shape, y.stride()))(F.conv2d(x, W)),
        lambda x: F.conv2d(x[0], W, B),
        lambda x: torch.vmap(lambda image: F.conv2d(image[None], W, B))(x),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_every_way_to_call_a_convolution(call: Any) -> None:
    def backend(graph: GraphModule, inputs: Any) -> Any:
        return lookup_backend("aot_eager")(widened(graph) or graph, inputs)

    images = torch.randn(2, 12, 9, 9, dtype=torch.double)
    got = torch.compile(call, backend=backend, dynamic=False)(images)
    torch.testing.assert_close(got, call(images), rtol=1e-12, atol=1e-12)


def test_even_widths_are_left_alone() -> None:
    network = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3))
    before: list[str] = []

    def backend(graph: GraphModule, inputs: Any) -> Any:
        before.append(graph.code)
        assert widened(graph) is None
        return lookup_backend("eager")(graph, inputs)

    torch.compile(network, backend=backend)(torch.randn(1, 3, 8, 8))
    assert len(before) == 1
