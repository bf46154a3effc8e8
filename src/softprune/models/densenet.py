"""DenseNet for CIFAR without bottlenecks or compression: DenseNet-40 with growth rate 12."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softprune.models.init import init_scp_


class DenseLayer(nn.Module):
    """BatchNorm-ReLU-3x3, whose `growth` output channels are concatenated to the input."""

    def __init__(self, in_channels: int, growth: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(in_channels)
        self.conv = nn.Conv2d(in_channels, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.conv(F.relu(self.bn(x)))], dim=1)


class Transition(nn.Module):
    """BatchNorm-ReLU-1x1 with the same number of channels, then a 2x2 average pool."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(channels)
        self.conv = nn.Conv2d(channels, channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(self.conv(F.relu(self.bn(x))), 2)


class DenseNet(nn.Module):
    """3x3 stem, three blocks of `DenseLayer` joined by a `Transition`, BatchNorm-ReLU, pool, linear.

    `stem_channels` is 24 in the authors' code of SCP and of Network Slimming; the counts in the Slimming paper are for
    a stem with 16 channels.
    """

    def __init__(
        self, layers_per_block: int, growth: int = 12, num_classes: int = 10, *, stem_channels: int = 24
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, stem_channels, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList()
        self.transitions = nn.ModuleList()
        width = stem_channels
        for block in range(3):
            if block > 0:
                self.transitions.append(Transition(width))
            layers = [DenseLayer(width + growth * index, growth) for index in range(layers_per_block)]
            self.blocks.append(nn.Sequential(*layers))
            width += growth * layers_per_block
        self.bn = nn.BatchNorm2d(width)
        self.classifier = nn.Linear(width, num_classes)
        init_scp_(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            if index > 0:
                x = self.transitions[index - 1](x)
            x = block(x)
        x = F.relu(self.bn(x))
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        return self.classifier(x)


densenet40 = partial(DenseNet, 12, 12)
