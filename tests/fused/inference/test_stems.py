"""First convolutions in steps of two read blocks of pixels; others do not."""

from collections.abc import Callable

import pytest
import torch
from fused_networks import assert_same, operators
from torch import nn

from softprune.fused.inference import fuse


@pytest.mark.parametrize(
    ("kernel", "padding", "size"),
    [
        (3, 1, (15, 18)),
        (4, 0, (16, 16)),
        (5, 2, (15, 18)),
        (7, 3, (16, 16)),
        ((5, 3), (3, 0), (16, 15)),
        (4, 1, (15, 18)),
        (7, (3, 0), (16, 15)),
    ],
)
def test_first_convolutions_read_blocks(
    kernel: int | tuple[int, int], padding: int | tuple[int, int], size: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, kernel, stride=2, padding=padding), nn.ReLU()).eval()
    images = torch.randn(2, 3, *size)
    made = fuse(model, images)
    assert operators(made)["pixel_unshuffle"] == 1
    (weight,) = [tensor for tensor in made.state_dict().values() if tensor.dim() == 4]
    assert weight.shape[1] == 16
    assert_same(model, made, images)
    assert made(images[:0]).shape == model(images[:0]).shape


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
    assert operators(made) == {"conv2d_relu": 1}
    assert_same(model, made, images)


def test_blocks_keep_channels_last_and_compile_in_one_piece() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 7, stride=2, padding=3), nn.ReLU()).eval()
    images = torch.randn(2, 3, 16, 16).to(memory_format=torch.channels_last)
    made = fuse(model.to(memory_format=torch.channels_last), images)
    assert made(images).is_contiguous(memory_format=torch.channels_last)
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True, dynamic=False)
    assert_same(model, compiled, images)
    assert compiled(images[:0]).shape == (0, 8, 8, 8)
