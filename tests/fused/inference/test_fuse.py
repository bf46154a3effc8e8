"""Fused networks compute what the network computes, in the operators that they should have.

Networks are in float64 where precision is not what is tested: others are fused in float64 first, then rounded.
"""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from export_networks import compacted, randomise_
from fused_networks import SideBySide, assert_same, operators
from topologies import TOPOLOGIES
from topologies import randomise_ as randomised
from torch import Tensor, nn

import softprune as sp
from softprune import models
from softprune.cut.comparison import compare, outputs_of
from softprune.errors import ConfigError, ModelError
from softprune.fused.inference import fuse
from softprune.graph import Example
from softprune.models.resnet_imagenet import BasicBlock


@pytest.mark.parametrize(
    ("build", "fused", "plain"),
    # ResNet: of the two convolutions before an addition one takes it along, the other stays. Pre-activation ResNets
    # end their branches in an addition whose ReLU comes behind a BatchNorm.
    [
        (lambda: models.VGG([[8], [16, 16]]), 3, 0),
        (lambda: models.ResNet(BasicBlock, (1, 1, 1, 1), 10), 9, 3),
        (lambda: models.OptionAResNet(2), 13, 0),
        (lambda: models.PreActResNet(1), 4, 5),
        (lambda: models.DenseNet(2), 0, 9),
    ],
    ids=["vgg", "resnet", "option-a", "pre-activation", "dense"],
)
def test_convolutions_take_what_follows_along(build: Callable[[], nn.Module], fused: int, plain: int) -> None:
    torch.manual_seed(0)
    model = build().eval().double()
    randomise_(model, dead=0)
    images = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    made = fuse(model, images)
    counted = operators(made)
    assert (counted["conv2d_relu"], counted["conv2d"]) == (fused, plain)
    if fused and not plain:
        assert not counted["relu"]
        assert not counted["add"]
    assert_same(model, made, images)
    assert_same(model, made, images[:1])


@pytest.mark.parametrize(
    "name",
    ["residual", "dense", "depthwise", "grouped", "squeeze-excite", "shuffle", "shared", "transposed", "1d", "u-net"],
)
def test_topologies(name: str) -> None:
    topology = TOPOLOGIES[name]
    model = randomised(topology.build()).double()
    given = Example.of(topology.example()).to_model(model)
    made = fuse(model, given, dynamic_batch=False)
    difference, scale = compare(outputs_of(model, given), outputs_of(made, given))
    assert difference <= 1e-4 * scale


@pytest.mark.parametrize("name", ["residual", "dense", "void"])
def test_cut_networks(name: str) -> None:
    _, compact, example = compacted(name)
    given = Example.of(example).to_model(compact.double())
    made = fuse(compact, given)
    difference, scale = compare(outputs_of(compact.eval(), given), outputs_of(made, given))
    assert difference <= 1e-4 * scale


class _Forward(nn.Module):
    """Two convolutions around an odd width, called by a function of the module and the images."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Conv2d(3, 13, 3, padding=1), nn.Conv2d(13, 8, 1), nn.Conv2d(13, 8, 1))
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
    "a softmax in float32": lambda net, x: net.two(F.softmax(_hidden(net, x), 1, dtype=torch.float32).to(x.dtype)),
    "dropout": lambda net, x: net.two(F.dropout(_hidden(net, x), training=False)),
    "writes to its input": lambda net, x: net.two(_hidden(net, x.mul_(2))),
    "infinite outputs": lambda net, x: (
        net.two(_hidden(net, x)).mean((2, 3)).masked_fill(torch.arange(8) > 5, float("-inf"))
    ),
}


PADDED = ("two branches of one width", "one hidden, two branches", "dropout")
OTHERS = ("ends in float32", "a comparison", "a constant", "a range", "a softmax in float32")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "dtype"),
    [(names, dtype) for names in (PADDED, OTHERS, ("infinite outputs",)) for dtype in (torch.float32, torch.bfloat16)]
    + [(("writes to its input",), torch.float32)],
)
def test_every_precision_is_the_network_s(names: tuple[str, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = SideBySide(_Forward(FORWARDS[name]) for name in names).eval().to(dtype)
    images = tuple(torch.randn(2, 3, 12, 12, dtype=dtype) for _ in names)
    before = copy.deepcopy(images)
    made = fuse(model, images, dynamic_batch=False)
    with torch.no_grad():
        want, got = (network(*copy.deepcopy(images)) for network in (model, made))
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    for name, left, right, given, unchanged in zip(names, want, got, images, before, strict=True):
        assert torch.equal(given, unchanged), name
        assert right.dtype == left.dtype, name
        torch.testing.assert_close(right, left, rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}")
    if names is PADDED:
        widths = {weight.shape[0] for weight in made.state_dict().values() if weight.dim() == 4}
        assert widths == {16, 8}


def test_weights_are_rounded_once() -> None:
    torch.manual_seed(0)
    model = models.PreActResNet(1).eval()
    randomise_(model, dead=0)
    images = torch.randn(2, 3, 32, 32)
    exact = fuse(copy.deepcopy(model).double(), images).state_dict()
    made = fuse(model, images, dtype=torch.bfloat16).state_dict()
    assert list(made) == list(exact)
    assert all(torch.equal(made[name], value.bfloat16()) for name, value in exact.items())


def test_every_weight_keeps_its_own_precision() -> None:
    torch.manual_seed(0)
    model = _Forward(lambda net, x: net.two(_hidden(net, x).to(net.two.weight.dtype))).eval().bfloat16()
    model.two.float()
    images = torch.randn(2, 3, 12, 12, dtype=torch.bfloat16)
    made = fuse(model, images)
    assert {weight.dtype for weight in made.state_dict().values()} == {torch.bfloat16, torch.float32}
    with torch.no_grad():
        want, got = model(images), made(images)
    assert want.dtype == got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


class _Odd(nn.Module):
    """Not the usual kind of parameters: `kind` says which."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        if kind == "integers first":
            self.table = nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=kind == "buffers")
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
    made = fuse(model, images, dynamic_batch=False)
    assert int(model.calls) == int(made.get_buffer("calls")) == 0
    torch.testing.assert_close(made(images), model(images))
    half = fuse(model, images, dtype=torch.float16, dynamic_batch=False)
    assert half(images.half()).dtype == torch.float16
    assert half.get_buffer("phase").dtype == torch.complex64


def test_precision_and_memory_order_are_the_network_s() -> None:
    _, compact, example = compacted("residual")
    small = compact.eval().bfloat16().to(memory_format=torch.channels_last)
    made = fuse(small, example.bfloat16(), dynamic_batch=False)
    weights = [tensor for tensor in made.state_dict().values() if tensor.dim() == 4]
    assert weights
    assert all(weight.dtype == torch.bfloat16 for weight in weights)
    assert all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)
    assert not any(parameter.requires_grad for parameter in made.parameters())
    assert not made.training


def test_what_is_refused() -> None:
    model, images = models.VGG([[8]], in_channels=1), torch.randn(2, 1, 8, 8)
    with pytest.raises(AssertionError, match=r"size\(\)\[2\] == 8"):
        fuse(model, images)(torch.randn(2, 1, 10, 8))
    sp.SoftPruner(model, images)
    with pytest.raises(ModelError, match="an export needs a network without masks"):
        fuse(model, images)
    with pytest.raises(ModelError, match="must have initialised parameters"):
        fuse(models.VGG([[8]], in_channels=1).to("meta"), images)
    for dtype in ("bfloat16", torch.int8, torch.complex64):
        with pytest.raises(ConfigError, match="`dtype` must be a floating dtype"):
            fuse(models.VGG([[8]], in_channels=1), images, dtype=dtype)  # type: ignore[arg-type]
    model = models.VGG([[8]], in_channels=1)
    model.lock = threading.Lock()  # of which no copy can be made
    with pytest.raises(ModelError, match=r"copy\.deepcopy must take it"):
        fuse(model, images)


def test_a_fused_network_compiles_in_one_piece() -> None:
    torch.manual_seed(0)
    model = _Forward(FORWARDS["one hidden, two branches"]).eval().double()
    images = torch.randn(2, 3, 12, 12, dtype=torch.float64)
    made = fuse(model, images, dynamic_batch=False)
    assert operators(made)["conv2d_relu"] == 2
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True, dynamic=False)
    assert_same(model, compiled, images)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["vgg16", "resnet18", "resnet56", "densenet40"])
def test_gpu_kernels_agree_with_separate_operators(name: str) -> None:
    torch.manual_seed(0)
    model = models.build(name, 10).eval()
    randomise_(model, dead=0)
    model = model.cuda().to(memory_format=torch.channels_last)
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


class _Flattened(nn.Module):
    """Flattens images, and adds a constant of their shape."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.register_buffer("place", torch.randn(1, 8, 4, 4))
        self.head = nn.Linear(128, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.conv(x))).flatten(1) + self.place.view(1, -1))


@pytest.mark.parametrize("model_order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("example_order", [torch.contiguous_format, torch.channels_last])
def test_images_come_in_any_memory_order(model_order: torch.memory_format, example_order: torch.memory_format) -> None:
    torch.manual_seed(0)
    model = _Flattened().eval()
    model.conv = model.conv.to(memory_format=model_order)  # type: ignore[call-overload]
    images = torch.randn(3, 3, 6, 6)
    made = fuse(model, images.contiguous(memory_format=example_order))
    for order in (torch.contiguous_format, torch.channels_last):
        assert_same(model, made, images.contiguous(memory_format=order))
    weights = [tensor for tensor in made.parameters() if tensor.ndim == 4]
    assert all(tensor.is_contiguous(memory_format=model_order) for tensor in weights)
    assert made.place.is_contiguous()


def test_names_that_a_network_has_already() -> None:
    torch.manual_seed(0)
    model = nn.Sequential()
    model.fused_0 = nn.Conv2d(3, 13, 3, stride=2, padding=1)
    model.fused_1 = nn.BatchNorm2d(13)
    model.relu, model.fused_2 = nn.ReLU(), nn.Conv2d(13, 7, 1)
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    assert_same(model, fuse(model.eval().double(), images), images)


class _OneImage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 7, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).view(1, 7, 16, 16)


def test_a_network_for_one_image_is_told_how() -> None:
    model, image = _OneImage().eval().double(), torch.randn(1, 3, 16, 16, dtype=torch.float64)
    with pytest.raises(ModelError, match=r"not of 2\. Pass dynamic_batch=False"):
        fuse(model, image)
    assert_same(model, fuse(model, image, dynamic_batch=False), image)


def test_learned_activations_of_timm_s_norms() -> None:
    layers = pytest.importorskip("timm.layers", reason='the "timm" extra is not installed')
    torch.manual_seed(0)
    norm = layers.BatchNormAct2d(8, act_layer=nn.PReLU)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.Conv2d(8, 8, 1)).eval().double()
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    assert_same(model, fuse(model, images), images)
