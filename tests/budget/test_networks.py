"""Targets on networks with skip connections and depthwise convolutions, however short the training."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import softprune as sp
from softprune.errors import ConfigError


class Down(nn.Module):
    def __init__(self, inputs: int, outputs: int, normalise: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 4, 2, 1, bias=not normalise)
        self.norm = nn.BatchNorm2d(outputs) if normalise else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(F.leaky_relu(x, 0.2)))


class Up(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose2d(inputs, outputs, 4, 2, 1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(F.relu(x)))


class Pix2Pix(nn.Module):
    """A generator of pix2pix in small: LeakyReLU on the way down, ReLU and concatenation on the way up."""

    def __init__(self) -> None:
        super().__init__()
        widths = (24, 48, 96, 96)
        self.first = nn.Conv2d(3, widths[0], 4, 2, 1)
        self.downs = nn.ModuleList(Down(a, b) for a, b in itertools.pairwise(widths))
        self.ups = nn.ModuleList([Up(96, 96), Up(192, 48), Up(96, 24)])
        self.last = nn.ConvTranspose2d(48, 3, 4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.first(x)]
        for down in self.downs:
            features.append(down(features[-1]))
        y = features.pop()
        for up in self.ups:
            y = torch.cat([up(y), features.pop()], 1)
        return torch.tanh(self.last(F.relu(y)))


def conv(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False), nn.BatchNorm2d(outputs)]


class Inverted(nn.Module):
    """MobileNetV2's block."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        wide = 4 * inputs
        self.adds = stride == 1 and inputs == outputs
        self.body = nn.Sequential(
            *conv(inputs, wide), nn.ReLU6(), *conv(wide, wide, 3, stride, wide), nn.ReLU6(), *conv(wide, outputs)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.adds else self.body(x)


class Fpn(nn.Module):
    """A feature pyramid on an encoder of inverted residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(*conv(3, 16, 3, 2), nn.ReLU6())
        self.stages = nn.ModuleList(
            nn.Sequential(Inverted(a, b, 2), Inverted(b, b, 1)) for a, b in ((16, 24), (24, 32), (32, 48))
        )
        self.laterals = nn.ModuleList(nn.Conv2d(width, 32, 1) for width in (24, 32, 48))
        self.smooth = nn.Sequential(*conv(32, 32, 3), nn.ReLU())
        self.head = nn.Conv2d(32, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        features = []
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        y = self.laterals[2](features[2])
        for number in (1, 0):
            y = F.interpolate(y, scale_factor=2) + self.laterals[number](features[number])
        return self.head(self.smooth(y))


@pytest.mark.parametrize("steps", [1, 40])
@pytest.mark.parametrize(("build", "share"), [(Pix2Pix, 0.5), (Fpn, 0.75)], ids=["pix2pix", "fpn"])
def test_a_target_is_met_or_refused_however_short_the_training(
    build: type[nn.Module], share: float, steps: int
) -> None:
    torch.manual_seed(0)
    model, x = build(), torch.randn(4, 3, 32, 32)
    pruner = sp.SoftPruner(model, x, target={"macs": share}, total_steps=steps, round_to=1)
    optimizer = torch.optim.SGD(pruner.parameter_groups(2e-4), lr=0.1, momentum=0.9)
    pruner.attach(optimizer)
    wanted = model(x).detach().mean(1, keepdim=True).sign()
    for _ in range(steps):
        optimizer.zero_grad()
        pruner.loss((model(x) - wanted).square().mean()).backward()
        optimizer.step()
    pruner.decide()
    status = pruner.status
    assert status is not None
    macs = sp.cost(pruner.compact(), x[:1]).macs
    assert macs == status.cost
    assert 0.96 * status.limit <= macs <= status.limit


def test_a_target_that_only_an_untrained_network_meets_is_refused() -> None:
    """Constants of removed channels are zero before training; after it some cannot be folded away."""
    floor = sp.inspect(Fpn(), torch.zeros(1, 3, 32, 32))
    share = 0.9 * floor.floor_macs / floor.macs
    with pytest.raises(ConfigError, match="within reach"):
        sp.SoftPruner(Fpn(), torch.zeros(2, 3, 32, 32), target={"macs": share}, total_steps=10)


class Split(nn.Module):
    """Half of the channels pass a further site, the others do not: which ones remain decides what a cut leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(*conv(3, 8), nn.ReLU()), nn.Sequential(*conv(4, 4, 3), nn.ReLU())
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.first(x).chunk(2, 1)
        return self.head(torch.cat([self.second(left), right], 1).mean((2, 3)))


def test_a_target_in_reach_of_some_channels_only_is_refused() -> None:
    x = torch.randn(4, 3, 8, 8)
    with pytest.raises(ConfigError, match="within reach"):
        sp.SoftPruner(Split(), x, target={"macs": 0.01}, total_steps=2)
