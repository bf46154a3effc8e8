"""Convolutions of a compiled step, widened or multiplied out, with the same outcome."""

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

from softprune import models
from softprune.fused.training import rewrite_graph
from softprune.fused.training.products import convolve_by_product


@pytest.fixture(autouse=True)
def _compiled_anew() -> None:
    """What other tests compiled must not count towards the limit of recompilations, beyond which nothing is."""
    torch.compiler.reset()


class _Convs(nn.Module):
    """Odd widths on both sides, few outputs, biases, strides, dilations, groups, shortcuts and branches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 12, 3, padding=1)
        self.bn = nn.BatchNorm2d(12)
        self.wide = nn.Conv2d(12, 16, 3, stride=2, padding=1, bias=False)
        self.point = nn.Conv2d(16, 13, 1)
        self.same = nn.Conv2d(13, 13, 3, padding="same", dilation=2)
        self.thin = nn.Conv2d(13, 5, 3, padding=1)
        self.back = nn.Conv2d(5, 13, 3, padding=1)
        self.grouped = nn.Conv2d(13, 26, 3, groups=13)
        self.even = nn.Conv2d(26, 16, 1)
        self.even2 = nn.Conv2d(16, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.first(x)))
        x = self.point(self.wide(x))
        x = x + F.relu(self.same(x))
        x = x + self.back(F.relu(self.thin(x)))
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
        wide = rewrite_graph(graph)
        assert wide is not None
        assert graph.code == before
        return aot_autograd(fw_compiler=inner)(wide, inputs)

    compiled = torch.compile(wider, backend=backend, dynamic=False)
    want = _gradients(eager, eager, images)
    got = _gradients(wider, compiled, images.contiguous(memory_format=memory_format))
    for mine, theirs in zip(got, want, strict=True):
        assert mine.shape == theirs.shape
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    # The thin one is a product now; the grouped one and the one of even widths stay.
    assert widths == [(16, 8), (16, 16), (16, 16), (16, 16), (16, 8), (16, 32), (8, 16)]


W, B = torch.randn(13, 12, 3, 3, dtype=torch.double), torch.randn(13, dtype=torch.double)
THIN = torch.randn(5, 12, 3, 3, dtype=torch.double)


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
        lambda x: F.conv2d(x, THIN, B[:5], 1, 1),
        lambda x: F.conv2d(input=x, weight=THIN, padding=(2, 0)),
        lambda x: F.conv2d(x, THIN, padding="same"),
        lambda x: F.conv2d(x, THIN, B[:5], stride=2),
        lambda x: (lambda y: y.as_strided(y.shape, y.stride()))(F.conv2d(x, THIN, padding=1)),
        lambda x: F.conv2d(x[0], THIN),
        lambda x: torch.vmap(lambda image: F.conv2d(image[None], W, B))(x),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_every_way_to_call_a_convolution(call: Any) -> None:
    def backend(graph: GraphModule, inputs: Any) -> Any:
        return lookup_backend("aot_eager")(rewrite_graph(graph) or graph, inputs)

    images = torch.randn(2, 12, 9, 9, dtype=torch.double)
    got = torch.compile(call, backend=backend, dynamic=False)(images)
    torch.testing.assert_close(got, call(images), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_gradient_of_a_product_has_the_memory_order_of_its_weight(memory_format: torch.memory_format) -> None:
    weight = torch.randn(5, 12, 3, 3).to(memory_format=memory_format).requires_grad_()
    images = torch.randn(2, 12, 9, 9).to(memory_format=memory_format)
    result = convolve_by_product(images, weight, (1, 1), torch.float32)
    (gradient,) = torch.autograd.grad(result.square().sum(), weight)
    assert gradient.stride() == weight.stride()


def test_even_widths_are_left_alone() -> None:
    network = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Conv2d(16, 8, 1))
    before: list[str] = []

    def backend(graph: GraphModule, inputs: Any) -> Any:
        before.append(graph.code)
        assert rewrite_graph(graph) is None
        return lookup_backend("eager")(graph, inputs)

    torch.compile(network, backend=backend)(torch.randn(1, 8, 8, 8))
    assert len(before) == 1


def test_padded_convolutions_call_torch_alone() -> None:
    """AOTAutograd does not cache graphs with other functions, so that every start would trace again."""
    called: list[Any] = []

    def backend(graph: GraphModule, inputs: Any) -> Any:
        rewritten = rewrite_graph(graph)
        assert rewritten is not None
        called.extend(node.target for node in rewritten.graph.nodes if node.op == "call_function")
        return lookup_backend("eager")(rewritten, inputs)

    torch.compile(nn.Conv2d(3, 12, 3), backend=backend)(torch.randn(1, 3, 8, 8))
    assert torch.conv2d in called
    assert all((each.__module__ or "torch").split(".")[0] == "torch" for each in called), called


@pytest.mark.parametrize("kernel", [(3, 3), (1, 3), (5, 2)])
@pytest.mark.parametrize("padding", [(0, 0), (1, 1), (2, 1), (0, 3)])
def test_a_product_is_the_convolution(kernel: tuple[int, int], padding: tuple[int, int]) -> None:
    torch.manual_seed(0)
    image = torch.randn(2, 11, 9, 7, dtype=torch.double, requires_grad=True)
    weight = torch.randn(3, 11, *kernel, dtype=torch.double, requires_grad=True)
    want = F.conv2d(image, weight, padding=padding)
    got = convolve_by_product(image, weight, padding, torch.double)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    pull = torch.randn_like(want)
    for mine, theirs in zip(
        torch.autograd.grad(got, (image, weight), pull), torch.autograd.grad(want, (image, weight), pull), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_a_product_in_bfloat16_is_rounded_like_the_convolution() -> None:
    torch.manual_seed(0)
    image, weight = torch.randn(4, 48, 8, 8), torch.randn(12, 48, 3, 3)
    exact = F.conv2d(image.bfloat16().double(), weight.bfloat16().double(), padding=1)
    product = convolve_by_product(image, weight, (1, 1), torch.bfloat16)
    assert product.dtype == torch.bfloat16
    # Its nine parts are rounded before they are summed: at most about as far off again as one rounding of the result.
    theirs = (exact.bfloat16().double() - exact).square().mean().sqrt()
    mine = (product.double() - exact).square().mean().sqrt()
    assert mine < 2 * theirs


@pytest.mark.parametrize(
    ("convolution", "side", "products"),
    [
        (nn.Conv2d(16, 8, 3), 64, True),
        (nn.Conv2d(16, 8, 3), 512, False),  # too large
        (nn.Conv2d(16, 8, 7, padding=3), 64, False),  # too many columns for its inputs
        (nn.Conv2d(80, 8, 5, padding=2), 2, True),
        (nn.Conv2d(80, 8, 5, padding=2), 1, False),  # taps beyond the image
    ],
)
def test_products_are_for_what_they_pay_for(convolution: nn.Conv2d, side: int, products: bool) -> None:
    found: list[bool] = []

    def backend(graph: GraphModule, inputs: Any) -> Any:
        fit = rewrite_graph(graph)
        found.append(fit is not None)
        return lookup_backend("eager")(graph, inputs)

    torch.compile(convolution, backend=backend, dynamic=False)(torch.randn(2, convolution.in_channels, side, side))
    assert found == [products]


def test_densenets_layers_are_products() -> None:
    left: list[int] = []

    def backend(graph: GraphModule, inputs: Any) -> Any:
        fit = rewrite_graph(graph)
        assert fit is not None
        left.append(len(fit.graph.find_nodes(op="call_function", target=torch.conv2d)))
        return lookup_backend("eager")(fit, inputs)

    network = models.DenseNet(4).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        got = torch.compile(network, backend=backend, dynamic=False)(images)
        torch.testing.assert_close(got, network(images), rtol=1e-4, atol=1e-5)
    assert left == [3]  # the stem and the transitions


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_a_gpu_computes_the_same_in_bfloat16() -> None:
    torch.manual_seed(0)
    network = _Convs().cuda().train().to(memory_format=torch.channels_last)
    images = torch.randn(8, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
    exact = copy.deepcopy(network).double()
    want = _gradients(exact, exact, images.double())

    def backend(graph: GraphModule, inputs: Any) -> Any:
        return lookup_backend("inductor")(rewrite_graph(graph), inputs)

    def errors(network: nn.Module, forward: Any) -> list[float]:
        def call(x: Tensor) -> Tensor:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                result: Tensor = forward(x)
            return result.float()

        pairs = zip(_gradients(network, call, images), want, strict=True)
        return [float((mine.double() - theirs).norm() / theirs.norm()) for mine, theirs in pairs]

    plain = copy.deepcopy(network)
    usual = errors(plain, plain)
    fit = errors(network, torch.compile(network, backend=backend, dynamic=False))
    # Rounding is all that differs, and there is as much of it as ever.
    assert all(mine < 2 * theirs + 1e-3 for mine, theirs in zip(fit, usual, strict=True)), (fit, usual)
