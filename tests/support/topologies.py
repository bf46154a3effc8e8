"""One table of network topologies, for every test that should hold whatever a network looks like.

Each entry builds a small network and an example for it, and has one mask with the widths and multiply-accumulates that
follow from it by hand: a library that froze everything would be exact too, and fail these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

Kept = Sequence[int]


@dataclass(frozen=True)
class Hand:
    """Channels kept at every site, and what a pencil says about the cut network."""

    kept: Mapping[str, Kept]
    widths: Mapping[str, tuple[int, int]]
    """Layer -> (inputs, outputs) after the cut; (0, n): replaced by a constant of n channels."""
    macs: int
    """Per sample."""
    selects: Mapping[str, int] | None = None
    """Modules that read through an index -> how many channels they pick."""


@dataclass(frozen=True)
class Topology:
    """A kind of network."""

    build: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the arguments, without the batch."""
    hand: Hand
    frozen: tuple[str, ...] = ()
    """BatchNorms that no activation follows."""
    kinds: tuple[str, ...] = ()
    """Kinds of sites beside BatchNorms that an activation reads."""

    def example(self, batch: int = 2, seed: int = 0) -> Any:
        """What the network is called with: a tensor, or a tuple of them."""
        generator = torch.Generator().manual_seed(seed)
        tensors = tuple(torch.randn(batch, *shape, generator=generator) for shape in self.shapes)
        return tensors[0] if len(tensors) == 1 else tensors


def randomise_(model: nn.Module, seed: int = 0) -> nn.Module:
    """Random BatchNorm parameters and statistics, so that nothing is zero or one by accident. Eval mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                if module.weight is not None:
                    module.weight.copy_(1 + 0.5 * torch.randn(module.num_features, generator=generator))
                    module.bias.copy_(0.5 * torch.randn(module.num_features, generator=generator))
                if module.running_mean is not None and module.running_var is not None:
                    module.running_mean.copy_(0.5 * torch.randn(module.num_features, generator=generator))
                    module.running_var.copy_(0.5 + torch.rand(module.num_features, generator=generator))
    return model.eval()


def masks_of(model: nn.Module, kept: Mapping[str, Kept]) -> dict[str, Tensor]:
    """Boolean masks from the channels kept."""
    masks = {}
    for name, channels in kept.items():
        width: Any = model.get_submodule(name).num_features
        masks[name] = torch.zeros(width, dtype=torch.bool)
        masks[name][list(channels)] = True
    return masks


def conv(inputs: int, outputs: int, **options: Any) -> nn.Conv2d:
    """3x3, same size, no bias: what most of these networks consist of."""
    return nn.Conv2d(inputs, outputs, 3, **{"padding": 1, "bias": False, **options})


def pooled(x: Tensor) -> Tensor:
    """Mean over space."""
    return F.adaptive_avg_pool2d(x, 1).flatten(1)


class Chain(nn.Module):
    """Two convolutions and a classifier. Subclasses put something between the convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(3, 8), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = conv(8, 6), nn.BatchNorm2d(6)
        self.fc = nn.Linear(6, 5)

    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Any:
        x = self.between(F.relu(self.bn1(self.conv1(x))))
        return self.fc(pooled(F.relu(self.bn2(self.conv2(x)))))


class Residual(nn.Module):
    """Post-activation: the stream is what BatchNorms give, added up."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = conv(3, 8), nn.BatchNorm2d(8)
        self.conv1, self.bn1 = conv(8, 6), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = conv(6, 8), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.stem(x)))
        branch = F.relu(self.bn1(self.conv1(x)))
        return self.fc(pooled(F.relu(x + self.bn2(self.conv2(branch)))))


class Branches(nn.Module):
    """BatchNorms that are added and then activated, as RepVGG trains."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = conv(3, 6), nn.BatchNorm2d(6)
        self.conv3, self.bn3 = conv(6, 6), nn.BatchNorm2d(6)
        self.conv1, self.bn1 = nn.Conv2d(6, 6, 1, bias=False), nn.BatchNorm2d(6)
        self.same = nn.BatchNorm2d(6)
        self.fc = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.stem(x)))
        return self.fc(pooled(F.relu(self.bn3(self.conv3(x)) + self.bn1(self.conv1(x)) + self.same(x))))


class Projection(Residual):
    """A residual block whose shortcut has a convolution and a BatchNorm of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.short, self.bn3 = nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.stem(x)))
        branch = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return self.fc(pooled(F.relu(branch + self.bn3(self.short(x)))))


class Linear(Chain):
    """A BatchNorm that a convolution reads with no activation in between."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(pooled(F.relu(self.bn2(self.conv2(self.bn1(self.conv1(x)))))))


class LinearStream(nn.Module):
    """A stream without activations, as MobileNetV2 has."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = conv(3, 8), nn.BatchNorm2d(8)
        self.conv1, self.bn1 = conv(8, 6), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = conv(6, 8), nn.BatchNorm2d(8)
        self.last, self.bn3 = conv(8, 4), nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.stem(x))
        x = x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return self.fc(pooled(F.relu(self.bn3(self.last(x)))))


class PaddedStreams(nn.Module):
    """Two stages with a stream each; the first enters the second between zero channels (option A).

    Args:
        before: Zero channels before the first stage's four; the second stage has eight.
    """

    def __init__(self, before: int) -> None:
        super().__init__()
        self.before = before
        self.stem, self.bn = conv(3, 4), nn.BatchNorm2d(4)
        self.conv1, self.bn1 = conv(4, 3), nn.BatchNorm2d(3)
        self.conv2, self.bn2 = conv(3, 4), nn.BatchNorm2d(4)
        self.conv3, self.bn3 = conv(4, 5, stride=2), nn.BatchNorm2d(5)
        self.conv4, self.bn4 = conv(5, 8), nn.BatchNorm2d(8)
        self.conv5, self.bn5 = conv(8, 6), nn.BatchNorm2d(6)
        self.conv6, self.bn6 = conv(6, 8), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.stem(x)))
        x = F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))
        x = F.relu(self.widened(x[:, :, ::2, ::2]) + self.bn4(self.conv4(F.relu(self.bn3(self.conv3(x))))))
        x = F.relu(x + self.bn6(self.conv6(F.relu(self.bn5(self.conv5(x))))))
        return self.fc(pooled(x))

    def widened(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, 0, self.before, 4 - self.before))


class PreActivation(nn.Module):
    """A raw stream that every block reads through its own BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 8)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {"bn1": nn.BatchNorm2d(8), "conv1": conv(8, 6), "bn2": nn.BatchNorm2d(6), "conv2": conv(6, 8)}
            )
            for _ in range(2)
        )
        self.bn = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            branch = block["conv1"](F.relu(block["bn1"](x)))  # type: ignore[index, operator]
            x = x + block["conv2"](F.relu(block["bn2"](branch)))  # type: ignore[index, operator]
        return self.fc(pooled(F.relu(self.bn(x))))


class Dense(nn.Module):
    """Concatenation: everything made so far is read by every later layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 4)
        self.bn1, self.conv1 = nn.BatchNorm2d(4), conv(4, 3)
        self.bn2, self.conv2 = nn.BatchNorm2d(7), conv(7, 3)
        self.bn = nn.BatchNorm2d(10)
        self.fc = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.cat([x, self.conv1(F.relu(self.bn1(x)))], 1)
        x = torch.cat([x, self.conv2(F.relu(self.bn2(x)))], 1)
        return self.fc(pooled(F.relu(self.bn(x))))


class Depthwise(nn.Module):
    def __init__(self, multiplier: int = 1, width: int = 8) -> None:
        super().__init__()
        self.conv, self.bn1 = conv(3, width), nn.BatchNorm2d(width)
        self.depthwise = conv(width, multiplier * width, groups=width)
        self.bn2 = nn.BatchNorm2d(multiplier * width)
        self.pointwise, self.bn3 = nn.Conv2d(multiplier * width, 6, 1, bias=False), nn.BatchNorm2d(6)
        self.fc = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv(x)))
        x = F.relu(self.bn2(self.depthwise(x)))
        return self.fc(pooled(F.relu(self.bn3(self.pointwise(x)))))


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn1 = conv(3, 8), nn.BatchNorm2d(8)
        self.grouped, self.bn2 = conv(8, 8, groups=2), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv(x)))
        return self.fc(pooled(F.relu(self.bn2(self.grouped(x)))))


class SqueezeExcite(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)

    def between(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.excite(F.relu(self.squeeze(x.mean((2, 3), keepdim=True)))))


class Shuffle(Chain):
    """Channel shuffle in the usual spelling, with sizes computed from the tensor."""

    def between(self, x: Tensor) -> Tensor:
        batch, width, height, across = x.shape
        return x.view(batch, 2, width // 2, height, across).transpose(1, 2).reshape(batch, -1, height, across)


class Chunk(nn.Module):
    """Two halves, read by different layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(3, 8), nn.BatchNorm2d(8)
        self.left, self.right = nn.Conv2d(4, 6, 1, bias=False), nn.Conv2d(4, 6, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(6)
        self.fc = nn.Linear(6, 5)

    def halves(self, x: Tensor) -> Sequence[Tensor]:
        return x.chunk(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.halves(F.relu(self.bn1(self.conv1(x))))
        return self.fc(pooled(F.relu(self.bn2(self.left(left) + self.right(right)))))


class Slice(Chunk):
    """The same by slices with bounds computed from the tensor."""

    def halves(self, x: Tensor) -> Sequence[Tensor]:
        middle = x.shape[1] // 2
        return x[:, :middle], x[:, middle:]


class OptionA(nn.Module):
    """A shortcut without parameters: every second pixel, and zero channels in the place of the new ones."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = conv(3, 4), nn.BatchNorm2d(4)
        self.conv1, self.bn1 = conv(4, 8, stride=2), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = conv(8, 8), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.stem(x)))
        branch = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        shortcut = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 2, 2))
        return self.fc(pooled(F.relu(shortcut + branch)))


class Flatten(nn.Module):
    """Every channel is sixteen features of the linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn1 = conv(3, 4), nn.BatchNorm2d(4)
        self.fc1, self.bn2 = nn.Linear(4 * 16, 8), nn.BatchNorm1d(8)
        self.fc2 = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_max_pool2d(F.relu(self.bn1(self.conv(x))), 4)
        return self.fc2(F.relu(self.bn2(self.fc1(torch.flatten(x, 1)))))


class Shared(nn.Module):
    """One convolution, called twice in a row, with a BatchNorm of its own behind each call."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = conv(3, 6), nn.BatchNorm2d(6)
        self.conv = conv(6, 6)
        self.bn1, self.bn2 = nn.BatchNorm2d(6), nn.BatchNorm2d(6)
        self.fc = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.stem(x)))
        x = F.relu(self.bn1(self.conv(x)))
        return self.fc(pooled(F.relu(self.bn2(self.conv(x)))))


class LayerScale(Chain):
    """A parameter that belongs to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8).view(8, 1, 1))

    def between(self, x: Tensor) -> Tensor:
        return x * self.scale


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(3, 6), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = conv(2, 6), nn.BatchNorm2d(6)
        self.conv, self.bn = conv(6, 4), nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 5)

    def forward(self, image: Tensor, depth: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(image))) + F.relu(self.bn2(self.conv2(depth)))
        return self.fc(pooled(F.relu(self.bn(self.conv(x)))))


class TwoOutputs(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = F.relu(self.bn1(self.conv1(x)))
        return {"map": self.map(x), "logits": self.fc(pooled(F.relu(self.bn2(self.conv2(x)))))}


class Transposed(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.conv2 = nn.ConvTranspose2d(8, 6, 2, stride=2)  # type: ignore[assignment]


class Pooled(nn.Module):
    """Pooling and resampling between BatchNorm and activation, in one dimension or, trilinear, in three."""

    def __init__(self, dimensions: int, inputs: int, widths: Sequence[int]) -> None:
        super().__init__()
        Conv, Norm, Max, Mean = (
            getattr(nn, f"{kind}{dimensions}d") for kind in ("Conv", "BatchNorm", "MaxPool", "AdaptiveAvgPool")
        )
        first, second, third = widths
        self.conv1, self.bn1 = Conv(inputs, first, 3, padding=1), Norm(first)
        self.conv2, self.bn2 = Conv(first, second, 3, padding=1), Norm(second)
        self.conv3, self.bn3 = Conv(second, third, 1), Norm(third)
        self.pool, self.up = Max(2), nn.Upsample(scale_factor=2, mode="trilinear" if dimensions == 3 else "nearest")
        self.head, self.fc = Mean(1), nn.Linear(third, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.pool(self.bn1(self.conv1(x))))
        x = F.relu(self.up(self.bn2(self.conv2(x))))
        return self.fc(F.relu(self.head(self.bn3(self.conv3(x)))).flatten(1))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.bn1 = conv(3, 6), nn.BatchNorm2d(6)
        self.middle, self.bn2 = conv(6, 8), nn.BatchNorm2d(8)
        self.up, self.bn3 = conv(14, 5), nn.BatchNorm2d(5)
        self.head = nn.Conv2d(5, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        down = F.relu(self.bn1(self.down(x)))
        middle = F.relu(self.bn2(self.middle(F.max_pool2d(down, 2))))
        middle = F.interpolate(middle, size=down.shape[2:], mode="nearest")
        return self.head(F.relu(self.bn3(self.up(torch.cat([middle, down], 1)))))


class LearnedSlope(Chain):
    """PReLU with a slope per channel, and with one slope."""

    def __init__(self) -> None:
        super().__init__()
        self.act1, self.act2 = nn.PReLU(8), nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.act1(self.bn1(self.conv1(x)))
        return self.fc(pooled(self.act2(self.bn2(self.conv2(x)))))


class InvertedResidual(nn.Module):
    """MobileNetV2: a channel dead before the depthwise convolution is a constant behind it, and folds."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = conv(3, 6), nn.BatchNorm2d(6)
        self.expand, self.bn1 = nn.Conv2d(6, 12, 1, bias=False), nn.BatchNorm2d(12)
        self.depthwise, self.bn2 = conv(12, 12, groups=12), nn.BatchNorm2d(12)
        self.project, self.bn3 = nn.Conv2d(12, 6, 1, bias=False), nn.BatchNorm2d(6)
        self.last, self.bn4 = nn.Conv2d(6, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self.bn(self.stem(x)))
        branch = F.relu6(self.bn2(self.depthwise(F.relu6(self.bn1(self.expand(x))))))
        x = x + self.bn3(self.project(branch))
        return self.fc(pooled(F.relu6(self.bn4(self.last(x)))))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.bn1 = nn.Linear(10, 8), nn.BatchNorm1d(8)
        self.fc2, self.bn2 = nn.Linear(8, 6), nn.BatchNorm1d(6)
        self.fc3 = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.fc1(x)))
        return self.fc3(F.relu(self.bn2(self.fc2(x))))


class PixelShuffle(Chain):
    """Four channels become one of twice the size, so they go together."""

    def __init__(self) -> None:
        super().__init__()
        self.conv2 = conv(2, 6)

    def between(self, x: Tensor) -> Tensor:
        return F.pixel_shuffle(x, 2)


IMAGE = ((3, 8, 8),)

TOPOLOGIES: dict[str, Topology] = {
    "chain": Topology(
        Chain,
        IMAGE,
        Hand(
            {"bn1": [0, 3, 5], "bn2": [1, 2]},
            {"conv1": (3, 3), "conv2": (3, 2), "fc": (2, 5)},
            64 * 27 * 3 + 64 * 9 * 3 * 2 + 2 * 5,
        ),
    ),
    "residual": Topology(
        Residual,
        IMAGE,
        # bn2 speaks on every channel of the stream, so all stay; conv1 does not read those that bn has silenced.
        Hand(
            {"bn": [0, 1, 2, 3], "bn1": [0, 2]},
            {"stem": (3, 8), "conv1": (4, 2), "conv2": (2, 8), "fc": (8, 5)},
            64 * 27 * 8 + 64 * 9 * 4 * 2 + 64 * 9 * 2 * 8 + 8 * 5,
            {"conv1": 4},
        ),
        frozen=("bn2",),
    ),
    "dead branch": Topology(
        Residual,
        IMAGE,
        Hand(
            {"bn": range(8), "bn1": []},
            {"stem": (3, 8), "conv1": (0, 1), "conv2": (0, 8), "fc": (8, 5)},
            64 * 27 * 8 + 8 * 5,
        ),
        frozen=("bn2",),
    ),
    "pre-activation": Topology(
        PreActivation,
        IMAGE,
        # Channels 5, 6, 7 of the stream are read by nobody and go at their sources.
        Hand(
            {
                "blocks.0.bn1": [0, 1, 2],
                "blocks.0.bn2": [0, 1],
                "blocks.1.bn1": [2, 3],
                "blocks.1.bn2": [5],
                "bn": [2, 3, 4],
            },
            {
                "stem": (3, 5),
                "blocks.0.conv1": (3, 2),
                "blocks.0.conv2": (2, 5),
                "blocks.1.conv1": (2, 1),
                "blocks.1.conv2": (1, 5),
                "fc": (3, 5),
            },
            64 * 27 * 5 + 64 * 9 * (3 * 2 + 2 * 5 + 2 * 1 + 1 * 5) + 3 * 5,
            {"blocks.0.bn1": 3, "blocks.1.bn1": 2, "bn": 3},
        ),
    ),
    "dense": Topology(
        Dense,
        IMAGE,
        # Of the stem 0 and 1 are read, of conv1 its 0 and 1 (4 and 5 of the stream), of conv2 its 0 and 1 (7 and 8).
        Hand(
            {"bn1": [0, 1], "bn2": [1, 4, 5], "bn": [1, 4, 7, 8]},
            {"stem": (3, 2), "conv1": (2, 2), "conv2": (3, 2), "fc": (4, 5)},
            64 * 27 * 2 + 64 * 9 * (2 * 2 + 3 * 2) + 4 * 5,
            {"bn2": 3, "bn": 4},
        ),
    ),
    "depthwise": Topology(
        Depthwise,
        IMAGE,
        # 4 and 5 are zero before the depthwise convolution, hence constant behind it: they fold into pointwise.
        Hand(
            {"bn1": [0, 1, 2, 3], "bn2": [2, 3, 4, 5], "bn3": [0, 1]},
            {"conv": (3, 2), "depthwise": (2, 2), "pointwise": (2, 2), "fc": (2, 5)},
            64 * 27 * 2 + 64 * 9 * 2 + 64 * 2 * 2 + 2 * 5,
        ),
    ),
    "depthwise multiplier": Topology(
        lambda: Depthwise(multiplier=2, width=4),
        IMAGE,
        # Outputs 0, 1 come from input 0 and 2, 3 from input 1; 7 comes from input 3, which is dead.
        Hand(
            {"bn1": [0, 1, 2], "bn2": [0, 3, 7], "bn3": [0, 1, 2]},
            {"conv": (3, 2), "depthwise": (2, 4), "pointwise": (2, 3), "fc": (3, 5)},
            64 * 27 * 2 + 64 * 9 * 4 + 64 * 2 * 3 + 3 * 5,
            {"bn2": 2},
        ),
    ),
    "grouped": Topology(
        Grouped,
        IMAGE,
        # Both groups keep as many inputs (3) and outputs (2) as the larger one needs.
        Hand(
            {"bn1": [0, 1, 2, 4], "bn2": [0, 1, 5]},
            {"conv": (3, 6), "grouped": (6, 4), "fc": (3, 5)},
            64 * 27 * 6 + 64 * 9 * 6 * 4 // 2 + 3 * 5,
            {"bn2": 3},
        ),
    ),
    "squeeze-excite": Topology(
        SqueezeExcite,
        IMAGE,
        Hand(
            {"bn1": [1, 2, 6], "bn2": [0]},
            {"conv1": (3, 3), "squeeze": (3, 4), "excite": (4, 3), "conv2": (3, 1), "fc": (1, 5)},
            64 * 27 * 3 + 3 * 4 + 4 * 3 + 64 * 9 * 3 * 1 + 1 * 5,
        ),
    ),
    "shuffle": Topology(
        Shuffle,
        IMAGE,
        # Two rows of four: 0 goes with 4, 1 with 5. 4 is silent, and conv2 does not read it.
        Hand(
            {"bn1": [0, 1, 5], "bn2": [3, 4]},
            {"conv1": (3, 4), "conv2": (3, 2), "fc": (2, 5)},
            64 * 27 * 4 + 64 * 9 * 3 * 2 + 2 * 5,
            {"conv2": 3},
        ),
    ),
    **{
        name: Topology(
            build,
            IMAGE,
            # Both halves keep three channels; of the right one two are silent, and not read.
            Hand(
                {"bn1": [0, 1, 2, 5], "bn2": [0, 1]},
                {"conv1": (3, 6), "left": (3, 2), "right": (1, 2), "fc": (2, 5)},
                64 * 27 * 6 + 64 * 3 * 2 + 64 * 1 * 2 + 2 * 5,
                {"right": 1},
            ),
        )
        for name, build in (("chunk", Chunk), ("slice", Slice))
    },
    "option-A": Topology(
        OptionA,
        IMAGE,
        Hand(
            {"bn": [0, 2], "bn1": [0, 1, 2]},
            {"stem": (3, 4), "conv1": (2, 3), "conv2": (3, 8), "fc": (8, 5)},
            64 * 27 * 4 + 16 * 9 * 2 * 3 + 16 * 9 * 3 * 8 + 8 * 5,
            {"conv1": 2},
        ),
        frozen=("bn2",),
    ),
    "flatten": Topology(
        Flatten,
        IMAGE,
        Hand(
            {"bn1": [1, 3], "bn2": [0, 1, 2]},
            {"conv": (3, 2), "fc1": (32, 3), "fc2": (3, 5)},
            64 * 27 * 2 + 32 * 3 + 3 * 5,
        ),
    ),
    "shared": Topology(
        Shared,
        IMAGE,
        # Inputs: bn speaks on 0, 1, 2 and bn1 on 1, 2, 3; outputs: bn1 reads 0 to 3 (0 stays silent) and bn2 0 and 5.
        Hand(
            {"bn": [0, 1, 2], "bn1": [1, 2, 3], "bn2": [0, 5]},
            {"stem": (3, 4), "conv": (4, 5), "fc": (2, 5)},
            64 * 27 * 4 + 2 * 64 * 9 * 4 * 5 + 2 * 5,
            {"bn1": 4, "bn2": 2},
        ),
    ),
    "layer scale": Topology(
        LayerScale,
        IMAGE,
        Hand(
            {"bn1": [0, 7], "bn2": [1, 2, 3]},
            {"conv1": (3, 2), "conv2": (2, 3), "fc": (3, 5)},
            64 * 27 * 2 + 64 * 9 * 2 * 3 + 3 * 5,
        ),
    ),
    "two inputs": Topology(
        TwoInputs,
        ((3, 8, 8), (2, 8, 8)),
        Hand(
            {"bn1": [0, 1, 2], "bn2": [2, 3], "bn": [0, 1]},
            {"conv1": (3, 4), "conv2": (2, 4), "conv": (4, 2), "fc": (2, 5)},
            64 * 27 * 4 + 64 * 18 * 4 + 64 * 9 * 4 * 2 + 2 * 5,
        ),
    ),
    "two outputs": Topology(
        TwoOutputs,
        IMAGE,
        Hand(
            {"bn1": [0, 1, 2], "bn2": [4]},
            {"conv1": (3, 3), "map": (3, 2), "conv2": (3, 1), "fc": (1, 5)},
            64 * 27 * 3 + 64 * 3 * 2 + 64 * 9 * 3 * 1 + 1 * 5,
        ),
    ),
    "transposed": Topology(
        Transposed,
        IMAGE,
        Hand(
            {"bn1": [0, 1, 2], "bn2": [0, 3]},
            {"conv1": (3, 3), "conv2": (3, 2), "fc": (2, 5)},
            64 * 27 * 3 + 64 * 4 * 3 * 2 + 2 * 5,
        ),
    ),
    "1-D, pooled before the activation": Topology(
        lambda: Pooled(1, 2, (6, 4, 4)),
        ((2, 8),),
        Hand(
            {"bn1": [0, 1, 2], "bn2": [1, 3], "bn3": [0]},
            {"conv1": (2, 3), "conv2": (3, 2), "conv3": (2, 1), "fc": (1, 5)},
            8 * 3 * 2 * 3 + 4 * 3 * 3 * 2 + 8 * 2 * 1 + 1 * 5,
        ),
    ),
    "3-D, pooled before the activation": Topology(
        lambda: Pooled(3, 1, (4, 4, 6)),
        ((1, 4, 4, 4),),
        Hand(
            {"bn1": [0, 1, 3], "bn2": [2], "bn3": [1, 4]},
            {"conv1": (1, 3), "conv2": (3, 1), "conv3": (1, 2), "fc": (2, 5)},
            64 * 27 * 1 * 3 + 8 * 27 * 3 * 1 + 64 * 1 * 2 + 2 * 5,
        ),
    ),
    "u-net": Topology(
        UNet,
        IMAGE,
        Hand(
            {"bn1": [0, 1], "bn2": [0, 1, 2], "bn3": [3]},
            {"down": (3, 2), "middle": (2, 3), "up": (5, 1), "head": (1, 2)},
            64 * 27 * 2 + 16 * 9 * 2 * 3 + 64 * 9 * 5 * 1 + 64 * 1 * 2,
        ),
    ),
    "prelu": Topology(
        LearnedSlope,
        IMAGE,
        Hand(
            {"bn1": [0, 1, 2], "bn2": [4, 5]},
            {"conv1": (3, 3), "conv2": (3, 2), "fc": (2, 5)},
            64 * 27 * 3 + 64 * 9 * 3 * 2 + 2 * 5,
        ),
    ),
    "inverted residual": Topology(
        InvertedResidual,
        IMAGE,
        # Live through the depthwise convolution are 3, 4, 5; 6, 7, 8 are constants that fold into project.
        Hand(
            {"bn": [0, 1, 2], "bn1": range(6), "bn2": range(3, 9), "bn4": [0, 1]},
            {"stem": (3, 6), "expand": (3, 3), "depthwise": (3, 3), "project": (3, 6), "last": (6, 2), "fc": (2, 5)},
            64 * 27 * 6 + 64 * 3 * 3 + 64 * 9 * 3 + 64 * 3 * 6 + 64 * 6 * 2 + 2 * 5,
            {"expand": 3},
        ),
        frozen=("bn3",),
    ),
    "mlp": Topology(
        MLP,
        ((10,),),
        Hand({"bn1": [0, 1, 2], "bn2": [4]}, {"fc1": (10, 3), "fc2": (3, 1), "fc3": (1, 3)}, 10 * 3 + 3 * 1 + 1 * 3),
    ),
    "pixel shuffle": Topology(
        PixelShuffle,
        IMAGE,
        # 0 to 3 make one channel, in which only 1 speaks; 4 to 7 are silent.
        Hand(
            {"bn1": [1], "bn2": [0, 1]},
            {"conv1": (3, 4), "conv2": (1, 2), "fc": (2, 5)},
            64 * 27 * 4 + 256 * 9 * 1 * 2 + 2 * 5,
        ),
    ),
}

GROUPED = {
    "sum of branches": Topology(
        Branches,
        IMAGE,
        # `same` reads what it gives: channel 4 of the stem stays, as zeros, since channel 4 of the sum is alive.
        Hand(
            {"bn": [0, 1, 2], "bn3": [1, 4]},
            {"stem": (3, 4), "conv3": (3, 2), "conv1": (3, 2), "fc": (2, 5)},
            64 * 27 * 4 + 64 * 9 * 3 * 2 + 64 * 3 * 2 + 2 * 5,
            {"conv3": 3, "conv1": 3, "same": 2},
        ),
        kinds=("sum",),
    ),
    "projection shortcut": Topology(
        Projection,
        IMAGE,
        Hand(
            {"bn": [0, 1, 2], "bn1": [3], "bn2": [5, 7]},
            {"stem": (3, 3), "conv1": (3, 1), "conv2": (1, 2), "short": (3, 2), "fc": (2, 5)},
            64 * 27 * 3 + 64 * 9 * 3 * 1 + 64 * 9 * 1 * 2 + 64 * 3 * 2 + 2 * 5,
        ),
        kinds=("sum",),
    ),
    "without an activation": Topology(
        Linear,
        IMAGE,
        Hand(
            {"bn1": [0, 2], "bn2": [1]},
            {"conv1": (3, 2), "conv2": (2, 1), "fc": (1, 5)},
            64 * 27 * 2 + 64 * 9 * 2 * 1 + 1 * 5,
        ),
        kinds=("linear",),
    ),
    "residual stream": Topology(
        Residual,
        IMAGE,
        Hand(
            {"bn": [0, 3, 5], "bn1": [1, 2]},
            {"stem": (3, 3), "conv1": (3, 2), "conv2": (2, 3), "fc": (3, 5)},
            64 * 27 * 3 + 64 * 9 * 3 * 2 + 64 * 9 * 2 * 3 + 3 * 5,
        ),
        kinds=("stream",),
    ),
    "linear stream": Topology(
        LinearStream,
        IMAGE,
        Hand(
            {"bn": [6], "bn1": [0, 5], "bn3": [1, 2]},
            {"stem": (3, 1), "conv1": (1, 2), "conv2": (2, 1), "last": (1, 2), "fc": (2, 5)},
            64 * 27 * 1 + 64 * 9 * 1 * 2 + 64 * 9 * 2 * 1 + 64 * 9 * 1 * 2 + 2 * 5,
        ),
        kinds=("stream", "linear"),
    ),
    "zero channels after a stream": Topology(
        lambda: PaddedStreams(0),
        IMAGE,
        # Channels 0 and 2 are dead in both stages. Of the second, 4 to 7 stay: forward() pads four.
        Hand(
            {"bn": [1, 3], "bn1": [0, 2], "bn3": [4], "bn4": [1, 3, 6], "bn5": [0, 1]},
            {"stem": (3, 2), "conv1": (2, 2), "conv2": (2, 2), "conv3": (2, 1), "conv4": (1, 6), "conv5": (3, 2)}
            | {"conv6": (2, 6), "fc": (3, 5)},
            64 * 27 * 2 + 2 * 64 * 9 * 2 * 2 + 16 * 9 * (2 * 1 + 1 * 6 + 3 * 2 + 2 * 6) + 3 * 5,
            {"conv5": 3, "fc": 3},
        ),
        kinds=("stream",),
    ),
    "zero channels around a stream": Topology(
        lambda: PaddedStreams(2),
        IMAGE,
        # Channel 4 of the second stage is alive, so that channel 2 of the first, which enters there, stays as zeros.
        Hand(
            {"bn": [1], "bn1": [0, 2], "bn3": [4], "bn4": [0, 3, 4], "bn5": [0, 1]},
            {"stem": (3, 2), "conv1": (1, 2), "conv2": (2, 2), "conv3": (1, 1), "conv4": (1, 6), "conv5": (3, 2)}
            | {"conv6": (2, 6), "fc": (3, 5)},
            64 * 27 * 2 + 64 * 9 * (1 * 2 + 2 * 2) + 16 * 9 * (1 * 1 + 1 * 6 + 3 * 2 + 2 * 6) + 3 * 5,
            {"conv1": 1, "conv3": 1, "conv5": 3, "fc": 3},
        ),
        kinds=("stream",),
    ),
}
"""Networks with sites of several BatchNorms, or without an activation."""
