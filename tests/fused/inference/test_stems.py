"""First convolutions in steps of two read blocks of pixels; others do not."""

import torch
from fused_networks import SideBySide, assert_same, operators
from torch import nn

from softprune.fused.inference import fuse


def _stem(layer: nn.Conv2d) -> nn.Sequential:
    return nn.Sequential(layer, nn.ReLU())


def test_first_convolutions_read_blocks() -> None:
    torch.manual_seed(0)
    cases = [
        (3, 1, (15, 18)),
        (4, 0, (16, 16)),
        (5, 2, (15, 18)),
        (7, 3, (16, 16)),
        ((5, 3), (3, 0), (16, 15)),
        (4, 1, (15, 18)),
        (7, (3, 0), (16, 15)),
    ]
    model = SideBySide(_stem(nn.Conv2d(3, 8, kernel, 2, padding)) for kernel, padding, _ in cases).eval().double()
    images = [torch.randn(2, 3, *size, dtype=torch.float64) for _, _, size in cases]
    made = fuse(model, tuple(images))
    assert operators(made)["pixel_unshuffle"] == len(cases)
    weights = [tensor for tensor in made.state_dict().values() if tensor.dim() == 4]
    assert [weight.shape[1] for weight in weights] == [16] * len(cases)
    assert_same(model, made, *images)
    none = [each[:0] for each in images]
    assert [output.shape for output in made(*none)] == [output.shape for output in model(*none)]


def test_other_convolutions_read_pixels() -> None:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(8, 8, 3, stride=2, padding=1),
        nn.Conv2d(3, 8, 3, stride=1, padding=1),
        nn.Conv2d(4, 8, 3, stride=2, groups=2),
        nn.Conv2d(3, 8, 3, stride=2, dilation=2),
        nn.Conv2d(3, 8, 1, stride=2),
        nn.Conv2d(3, 8, 3, stride=(2, 1)),
    ]
    model = SideBySide(_stem(layer) for layer in layers).eval().double()
    images = [torch.randn(2, layer.in_channels, 12, 12, dtype=torch.float64) for layer in layers]
    made = fuse(model, tuple(images))
    assert operators(made) == {"conv2d_relu": len(layers)}
    assert_same(model, made, *images)


def test_blocks_keep_channels_last_and_compile_in_one_piece() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 7, stride=2, padding=3), nn.ReLU()).eval()
    images = torch.randn(2, 3, 16, 16).to(memory_format=torch.channels_last)
    made = fuse(model.to(memory_format=torch.channels_last), images)
    assert made(images).is_contiguous(memory_format=torch.channels_last)
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True, dynamic=False)
    assert_same(model, compiled, images)
    assert compiled(images[:0]).shape == (0, 8, 8, 8)
