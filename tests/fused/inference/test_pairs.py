"""Convolutions around a wide stream: which are joined, and that the outcome stays."""

import os
import subprocess
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from fused_networks import assert_same, operators
from torch import Tensor, nn

from softprune.fused.inference import fuse, pair_operator
from softprune.fused.inference.pair_operator import widen_narrow_relu, widen_relu


class _Blocks(nn.Module):
    """Two bottlenecks: into the stream and out of it, twice."""

    def __init__(
        self,
        *,
        inside: int = 8,
        following: int = 8,
        stride: int = 1,
        shortcut_first: bool = False,
        kernel: int = 1,
        watched: bool = False,
    ) -> None:
        super().__init__()
        self.shortcut_first, self.watched = shortcut_first, watched
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.down = nn.Conv2d(16, 32, 1, stride=stride, bias=False)
        self.reduce = nn.Conv2d(16, inside, 3, stride=stride, padding=1)
        self.expand = nn.Conv2d(inside, 32, kernel, padding=kernel // 2)
        self.reduce2 = nn.Conv2d(32, following, 1)
        self.expand2 = nn.Conv2d(following, 32, 1, bias=False)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        if self.shortcut_first:
            shortcut = self.down(x)
            stream = F.relu(self.expand(F.relu(self.reduce(x))) + shortcut)
        else:
            wide = self.expand(F.relu(self.reduce(x)))
            stream = F.relu(wide + self.down(x))
        result = F.relu(self.expand2(F.relu(self.reduce2(stream))) + stream)
        result = self.head(result.mean((2, 3)))
        return result + stream.amax() if self.watched else result


@pytest.mark.parametrize(
    ("options", "size", "joined"),
    [
        # The shortcut's convolution and the next one's, in one operator; the second block has no next one.
        ({}, 24, {"widen_narrow_relu": 1}),
        ({"shortcut_first": True}, 24, {"widen_narrow_relu": 1}),
        ({"stride": 2}, 48, {"widen_narrow_relu": 1}),
        ({"stride": 2, "shortcut_first": True}, 47, {"widen_narrow_relu": 1}),
        ({"watched": True}, 24, {"widen_narrow_relu": 1}),
        # Too many channels to narrow them on the way: the shortcut alone is joined.
        ({"following": 72}, 24, {"widen_relu": 1}),
        ({"inside": 72, "following": 72}, 24, {"widen_relu": 1}),
        # Of the shortcut and a convolution of more pixels, one takes the other's result.
        ({"kernel": 3}, 24, {"widen_narrow_relu": 1}),
        ({"kernel": 3, "shortcut_first": True}, 24, {}),
        # Images are small.
        ({}, 16, {}),
        ({"stride": 2}, 32, {}),
    ],
)
def test_what_is_joined_computes_the_same(options: dict[str, int], size: int, joined: dict[str, int]) -> None:
    torch.manual_seed(0)
    model, images = _Blocks(**options).double().eval(), torch.randn(2, 3, size, size, dtype=torch.double)  # type: ignore[arg-type]
    made = fuse(model, images)
    found = {name: count for name, count in operators(made).items() if name.startswith("widen")}
    assert found == joined
    assert_same(model, made, images)
    assert_same(model, made, torch.randn(5, 3, size, size, dtype=torch.double))
    if not options.get("watched"):  # its network itself takes no empty batch
        assert made(images[:0]).shape == model(images[:0]).shape


def test_a_joined_network_compiles_in_one_piece() -> None:
    torch.manual_seed(0)
    model, images = _Blocks(stride=2).eval(), torch.randn(2, 3, 48, 48)
    made = fuse(model.to(memory_format=torch.channels_last), images)
    assert operators(made)["widen_narrow_relu"] == 1
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True, dynamic=False)
    assert_same(model, compiled, images.to(memory_format=torch.channels_last))


def _tensors(inside: int, wide: int, narrow: int, shortcut: int, stride: int) -> dict[str, Tensor]:
    def images(*shape: int) -> Tensor:
        return torch.randn(*shape).div(4).to(memory_format=torch.channels_last)

    return {
        "image": images(2, inside, 7, 5),
        "weight": images(wide, inside, 1, 1),
        "bias": torch.randn(wide),
        "other": images(2, wide, 7, 5),
        "shortcut": images(2, shortcut, 7 * stride - stride + 1, 5 * stride),
        "shortcut_weight": images(wide, shortcut, 1, 1),
        "next_weight": images(narrow, wide, 1, 1),
        "next_bias": torch.randn(narrow),
    }


def _expected(given: dict[str, Tensor], stride: int) -> tuple[Tensor, Tensor, Tensor]:
    """The stream with the other tensor, what is read of it, and the stream with the shortcut."""
    wide = F.conv2d(given["image"], given["weight"], given["bias"])
    stream = F.relu(wide + given["other"])
    narrow = F.relu(F.conv2d(stream, given["next_weight"], given["next_bias"]))
    return stream, narrow, F.relu(wide + F.conv2d(given["shortcut"], given["shortcut_weight"], stride=stride))


@pytest.mark.parametrize("stride", [1, 2])
def test_the_operators_where_there_is_no_kernel(stride: int) -> None:
    torch.manual_seed(0)
    given = _tensors(8, 24, 6, 12, stride)
    stream, narrow, made = _expected(given, stride)
    first = (given["image"], given["weight"], given["bias"])
    shortcut = (given["shortcut"], given["shortcut_weight"], stride)
    following = (given["next_weight"], given["next_bias"])
    got = widen_narrow_relu(*first, given["other"], None, None, 1, *following)
    torch.testing.assert_close(got, (stream, narrow))
    torch.testing.assert_close(widen_relu(*first, *shortcut), made)
    both = widen_narrow_relu(*first, None, *shortcut, *following)
    torch.testing.assert_close(both[0], made)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(widen_relu, (*first, *shortcut), test_utils=checks)
    torch.library.opcheck(widen_narrow_relu, (*first, None, *shortcut, *following), test_utils=checks)


_KERNEL = """
import sys, torch
import test_pairs as t
from softprune.fused.inference.pair_kernel import launch
device = sys.argv[1]
for widths in ((32, 64, 32, 48), (24, 80, 40, 16), (8, 64, 8, 130)):
    for stride in (1, 2):
        torch.manual_seed(0)
        given = {name: each.half() for name, each in t._tensors(*widths, stride).items()}
        stream, narrow, made = t._expected({name: each.float() for name, each in given.items()}, stride)
        given = {name: each.to(device) for name, each in given.items()}
        first = (given["image"], given["weight"], given["bias"])
        shortcut = (given["shortcut"], given["shortcut_weight"], stride)
        following = (given["next_weight"], given["next_bias"])
        got = launch(*first, given["other"], None, None, 1, *following)
        near = dict(rtol=4e-3, atol=4e-3)
        torch.testing.assert_close([each.float().cpu() for each in got], [stream, narrow], **near)
        got = launch(*first, None, *shortcut, None, None)
        assert got[1] is None and got[0].is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(got[0].float().cpu(), made, **near)
        again = launch(*first, None, *shortcut, *following)
        assert torch.equal(again[0], got[0])
        plain = launch(given["image"], given["weight"], None, given["other"], None, None, 1, given["next_weight"], None)
        assert not torch.allclose(plain[1].float().cpu(), narrow, **near)
        turned = [each.transpose(0, 1).contiguous().transpose(0, 1) for each in (first[1], following[0])]
        other = (given["other"], None, None, 1)
        other = launch(first[0], turned[0], first[2], *other, turned[1], following[1])
        torch.testing.assert_close([each.float().cpu() for each in other], [stream, narrow], **near)
print("all agree")
"""


def _cannot_compile(*arguments: object) -> None:
    raise RuntimeError("Failed to find C compiler")


@pytest.mark.parametrize("kernel", [None, types.SimpleNamespace(launch=_cannot_compile)])
def test_without_triton_or_its_compiler_convolutions_run_one_by_one(
    kernel: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "softprune.fused.inference.pair_kernel", kernel)
    monkeypatch.setattr(pair_operator, "has_kernel", lambda device, dtype: True)
    pair_operator._kernel.cache_clear()
    image, weight = torch.randn(2, 16, 4, 4), torch.randn(16, 16, 1, 1)
    for _ in range(2):
        stream, narrow = widen_narrow_relu(image, weight, None, image, None, None, 1, weight, None)
    pair_operator._kernel.cache_clear()
    torch.testing.assert_close(stream, F.relu(F.conv2d(image, weight) + image))
    torch.testing.assert_close(narrow, F.relu(F.conv2d(stream, weight)))
    (said,) = caplog.records  # once
    assert "one by one" in said.getMessage()


def test_no_kernel_is_asked_for_an_empty_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_operator, "has_kernel", lambda device, dtype: True)
    monkeypatch.setattr(pair_operator, "_kernel", _cannot_compile)
    image, weight = torch.randn(0, 16, 4, 4), torch.randn(24, 16, 1, 1)
    narrowing, shortcut = torch.randn(8, 24, 1, 1), torch.randn(0, 24, 4, 4)
    stream, narrow = widen_narrow_relu(image, weight, None, shortcut, None, None, 1, narrowing, None)
    assert (stream.shape, narrow.shape) == ((0, 24, 4, 4), (0, 8, 4, 4))
    assert widen_relu(image, weight, None, image, weight, 1).shape == (0, 24, 4, 4)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_gpu_the_kernel_agrees_with_separate_operators(device: str) -> None:
    """On a GPU; and, where there is Triton but none, in its interpreter."""
    pytest.importorskip("triton", reason="Triton comes with PyTorch for GPUs")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    here = os.path.dirname(__file__)
    paths = os.pathsep.join([here, os.path.dirname(here), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths} | ({"TRITON_INTERPRET": "1"} if device == "cpu" else {})
    done = subprocess.run(
        [sys.executable, "-c", _KERNEL, device], env=environment, capture_output=True, text=True
    )
    assert "all agree" in done.stdout, done.stderr[-2000:]
