"""Fused networks compute what the network computes, in the operators that they should have."""

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from export_networks import compacted, randomise_
from torch import Tensor, nn
from torch.fx import GraphModule

import softprune as sp
from softprune import models
from softprune.errors import ModelError
from softprune.export import fuse
from softprune.export.fusing.operator import conv2d_relu


def _operators(fused: GraphModule) -> Counter[str]:
    names = [str(node.target) for node in fused.graph.nodes if node.op == "call_function"]
    return Counter(name.split(".")[1] for name in names if "." in name)


def _assert_same(model: nn.Module, fused: nn.Module, images: Tensor) -> None:
    with torch.no_grad():
        want, got = model.eval()(images), fused(images)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize(
    ("name", "fused", "plain"),
    # ResNet-50: four shortcuts have a convolution that adds nothing. Pre-activation ResNets end their branches in an
    # addition whose ReLU comes behind a BatchNorm.
    [
        ("vgg16", 13, 0),
        ("resnet18", 17, 3),
        ("resnet56_a", 55, 0),
        ("resnet20", 10, 11),
        ("densenet40", 0, 39),
    ],
)
def test_convolutions_take_what_follows_along(name: str, fused: int, plain: int) -> None:
    torch.manual_seed(0)
    model = models.build(name, 10).eval()
    randomise_(model, dead=0)
    images = torch.randn(3, *models.REGISTRY[name].input_shape)[:, :, :64, :64]
    made = fuse(model, images)
    counted = _operators(made)
    assert (counted["conv2d_relu"], counted["conv2d"]) == (fused, plain)
    if fused and not plain:
        assert not counted["relu"]
        assert not counted["add"]
    _assert_same(model, made, images)
    _assert_same(model, made, images[:1])


@pytest.mark.parametrize("name", ["shufflenet_v2_x0_5", "mobilenet_v3_small", "regnet_y_400mf"])
def test_networks_of_others(name: str) -> None:
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, weights=None, num_classes=10).eval()
    randomise_(model, dead=0)
    images = torch.randn(2, 3, 64, 64)
    made = fuse(model, images)
    assert _operators(made)["conv2d_relu"] >= 5
    _assert_same(model, made, images)


def test_a_cut_network_has_whole_widths_between_its_convolutions() -> None:
    torch.manual_seed(0)
    model = models.build("vgg16", 10)
    images = torch.randn(2, 3, 32, 32)
    pruner = sp.SoftPruner(model, images)
    with torch.no_grad():
        for number, site in enumerate(pruner.sites):
            model.get_submodule(site.name).bias[: 7 + number] = -3.0
            model.get_submodule(site.name).weight[: 7 + number] = 0.1
    compact = pruner.compact().eval()
    before = copy.deepcopy(compact.state_dict())
    made = fuse(compact, images)
    weights = [tensor for tensor in made.state_dict().values() if tensor.dim() == 4]
    # All but the last, which a linear layer reads, and the colours.
    assert sum(weight.shape[0] % 8 > 0 for weight in weights) == 1
    assert sum(weight.shape[1] % 8 > 0 for weight in weights) == 1
    _assert_same(compact, made, images)
    for key, value in compact.state_dict().items():
        assert torch.equal(value, before[key]), "the network itself is left alone"


class _Sums(nn.Module):
    """Convolutions around additions, one shape for all; `kind` says what is added to what."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 6, 1)
        self.scale = nn.Parameter(torch.randn(6, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        one = self.first(x)
        if self.kind == "itself":
            return F.relu(one + one)
        if self.kind == "twice":
            return F.relu(one + x) + one
        if self.kind == "broadcast":
            return F.relu(one + self.scale)
        if self.kind == "alpha":
            return F.relu(torch.add(one, x, alpha=2))
        if self.kind == "number":
            return F.relu(one + 1.5)
        if self.kind == "both":
            return F.relu(one + self.second(x))
        if self.kind == "sum is read":
            total = one + x
            return F.relu(total) + total
        if self.kind == "in place":
            x = x * 1.0
            x += one
            return F.relu_(x)
        raise AssertionError(self.kind)


@pytest.mark.parametrize(
    ("kind", "fused"),
    [
        ("itself", 0),
        ("twice", 0),
        ("broadcast", 0),
        ("alpha", 0),
        ("number", 0),
        ("both", 1),
        ("sum is read", 0),
        ("in place", 1),
    ],
)
def test_additions(kind: str, fused: int) -> None:
    torch.manual_seed(0)
    model, images = _Sums(kind).eval(), torch.randn(2, 6, 5, 7)
    made = fuse(model, images)
    assert _operators(made)["conv2d_relu"] == fused
    _assert_same(model, made, images)


@pytest.mark.parametrize("kernel", [3, 4, 5, 7, (5, 3)])
@pytest.mark.parametrize(
    ("padding", "size"), [(0, (16, 16)), (1, (15, 18)), (2, (15, 18)), (3, (16, 16)), ((3, 0), (16, 15))]
)
def test_first_convolutions_read_blocks(
    kernel: int | tuple[int, int], padding: int | tuple[int, int], size: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, kernel, stride=2, padding=padding), nn.ReLU()).eval()
    images = torch.randn(2, 3, *size)
    made = fuse(model, images)
    assert _operators(made)["pixel_unshuffle"] == 1
    (weight,) = [tensor for tensor in made.state_dict().values() if tensor.dim() == 4]
    assert weight.shape[1] == 16
    _assert_same(model, made, images)


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.Conv2d(8, 8, 3, stride=2, padding=1),
        lambda: nn.Conv2d(3, 8, 3, stride=1, padding=1),
        lambda: nn.Conv2d(4, 8, 3, stride=2, groups=2),
        lambda: nn.Conv2d(3, 8, 3, stride=2, dilation=2),
        lambda: nn.Conv2d(3, 8, 1, stride=2),
        lambda: nn.Conv2d(3, 8, 3, stride=(2, 1)),
    ],
)
def test_other_convolutions_read_pixels(layer: Callable[[], nn.Conv2d]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(layer(), nn.ReLU()).eval()
    images = torch.randn(2, model[0].in_channels, 12, 12)  # type: ignore[arg-type]
    made = fuse(model, images)
    assert _operators(made) == {"conv2d_relu": 1}
    _assert_same(model, made, images)


def test_convolutions_of_each_channel_by_itself_stay() -> None:
    model, images = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.ReLU()).eval(), torch.randn(2, 8, 6, 6)
    made = fuse(model, images)
    assert _operators(made) == {"conv2d": 1, "relu": 1}
    _assert_same(model, made, images)


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


@pytest.mark.parametrize("reader", ["sum", "groups", "shortcut", "sigmoid", "pool"])
def test_widths_stay_where_not_only_convolutions_read_them(reader: str) -> None:
    torch.manual_seed(0)
    model, images = _Readers(reader).eval(), torch.randn(2, 8, 6, 6)
    made = fuse(model, images)
    (first,) = [t for t in made.state_dict().values() if t.dim() == 4 and t.shape[1] == 8 and t.shape[0] > 8][
        :1
    ]
    assert first.shape[0] == (16 if reader == "pool" else 13)
    _assert_same(model, made, images)


class _Forward(nn.Module):
    """Two convolutions around an odd width, called by a function of the module and the images."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.two, self.three = (
            nn.Conv2d(3, 13, 3, padding=1),
            nn.Conv2d(13, 8, 1),
            nn.Conv2d(13, 8, 1),
        )
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def _hidden(net: Any, x: Tensor) -> Tensor:
    return F.relu(net.one(x))


FORWARDS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "two branches of one width": lambda net, x: F.relu(net.two(_hidden(net, x)) + net.three(_hidden(net, x))),
    "one hidden, two branches": lambda net, x: (lambda h: F.relu(net.two(h) + net.three(h)))(_hidden(net, x)),
    "ends in float32": lambda net, x: F.softmax(net.two(_hidden(net, x)).mean((2, 3)).float(), -1),
    "a comparison": lambda net, x: net.two((_hidden(net, x) > 0.1).to(x.dtype)),
    "a constant": lambda net, x: net.two(_hidden(net, x) * torch.ones(1, 13, 1, 1, dtype=x.dtype)),
    "a range": lambda net, x: _hidden(net, x).mean((2, 3)) * torch.arange(13, dtype=x.dtype),
    "a softmax in float32": lambda net, x: net.two(
        F.softmax(_hidden(net, x), 1, dtype=torch.float32).to(x.dtype)
    ),
    "dropout": lambda net, x: net.two(F.dropout(_hidden(net, x), training=False)),
    "writes to its input": lambda net, x: net.two(_hidden(net, x.mul_(2))),
    "infinite outputs": lambda net, x: (
        net.two(_hidden(net, x)).mean((2, 3)).masked_fill(torch.arange(8) > 5, float("-inf"))
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORWARDS)
def test_every_precision_is_the_network_s(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, images = _Forward(FORWARDS[name]).eval().to(dtype), torch.randn(2, 3, 12, 12, dtype=dtype)
    before = images.clone()
    made = fuse(model, images)
    with torch.no_grad():
        want, got = model(images.clone()), made(images.clone())
    assert torch.equal(images, before)
    assert got.dtype == want.dtype
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    if name in ("two branches of one width", "one hidden, two branches", "dropout"):
        widths = {weight.shape[0] for weight in made.state_dict().values() if weight.dim() == 4}
        assert widths == {16, 8}


def test_weights_are_rounded_once() -> None:
    torch.manual_seed(0)
    model = models.build("resnet20", 10).eval()
    randomise_(model, dead=0)
    images = torch.randn(2, 3, 32, 32)
    exact = fuse(copy.deepcopy(model).double(), images).state_dict()
    made = fuse(model, images, dtype=torch.bfloat16).state_dict()
    assert list(made) == list(exact)
    assert all(torch.equal(made[name], value.bfloat16()) for name, value in exact.items())


class _Odd(nn.Module):
    """Not the usual kind of parameters: `kind` says which."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        if kind == "integers first":
            self.table = nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("phase", torch.randn(4, dtype=torch.complex64))
        weight = torch.randn(8, 3, 3, 3)
        if kind == "buffers":
            self.register_buffer("weight", weight)
        else:
            self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return F.relu(F.conv2d(x, self.weight)) + self.phase.real.sum()


@pytest.mark.parametrize("kind", ["integers first", "buffers"])
def test_odd_parameters(kind: str) -> None:
    torch.manual_seed(0)
    model, images = _Odd(kind).eval(), torch.randn(2, 3, 6, 6)
    made = fuse(model, images)
    assert int(model.calls) == int(made.get_buffer("calls")) == 0
    torch.testing.assert_close(made(images), model(images))
    half = fuse(model, images, dtype=torch.float16)
    assert half(images.half()).dtype == torch.float16
    assert half.get_buffer("phase").dtype == torch.complex64


def test_precision_and_memory_order_are_the_network_s() -> None:
    _, compact, example = compacted("residual")
    small = compact.eval().bfloat16().to(memory_format=torch.channels_last)
    made = fuse(small, example.bfloat16())
    weights = [tensor for tensor in made.state_dict().values() if tensor.dim() == 4]
    assert weights
    assert all(weight.dtype == torch.bfloat16 for weight in weights)
    assert all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)
    assert not any(parameter.requires_grad for parameter in made.parameters())
    assert not made.training


def test_what_is_refused() -> None:
    model, images = models.build("digits_net", 10), torch.randn(2, 1, 8, 8)
    with pytest.raises(AssertionError, match=r"size\(\)\[2\] == 8"):
        fuse(model, images)(torch.randn(2, 1, 10, 8))
    sp.SoftPruner(model, images)
    with pytest.raises(ModelError, match="must be cut before"):
        fuse(model, images)
    with pytest.raises(ModelError, match="must have values"):
        fuse(models.build("digits_net", 10).to("meta"), images)


def test_a_fused_network_compiles_in_one_piece() -> None:
    torch.manual_seed(0)
    model, images = models.build("resnet20", 10).eval(), torch.randn(2, 3, 32, 32)
    made = fuse(model, images)
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True, dynamic=False)
    _assert_same(model, compiled, images)


@pytest.mark.parametrize("other", [False, True])
def test_the_operator_is_sound(other: bool) -> None:
    torch.manual_seed(0)
    image, weight, bias = torch.randn(2, 4, 6, 6), torch.randn(8, 4, 3, 3), torch.randn(8)
    added = torch.randn(2, 8, 3, 3) if other else None
    values = (image, weight, bias, added, [2, 2], [1, 1], [1, 1], 1)
    torch.library.opcheck(conv2d_relu, values)
    want = F.conv2d(image, weight, bias, 2, 1)
    torch.testing.assert_close(conv2d_relu(*values), F.relu(want if added is None else want + added))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["vgg16", "resnet18", "resnet56"])
def test_gpu_kernels_agree_with_separate_operators(name: str) -> None:
    torch.manual_seed(0)
    model = models.build(name, 10).eval().cuda().to(memory_format=torch.channels_last)
    randomise_(model, dead=0)
    images = torch.randn(4, *models.REGISTRY[name].input_shape, device="cuda")[:, :, :64, :64]
    images = images.to(memory_format=torch.channels_last)
    half = copy.deepcopy(model).bfloat16()
    made = fuse(model, images, dtype=torch.bfloat16)
    with torch.no_grad():
        want = model(images)
        scale = float(want.abs().max())
        separate = float((half(images.bfloat16()).float() - want).abs().max()) / scale
        for network in (made, torch.compile(made, dynamic=False)):
            together = float((network(images.bfloat16()).float() - want).abs().max()) / scale
            assert together <= 1.5 * separate + 0.01
