"""Pre-activation bottleneck ResNet for CIFAR as used with Network Slimming: ResNet-164."""

import torch.nn.functional as F
from torch import Tensor, nn

from softprune.models.init import init_scp_

EXPANSION = 4
"""Block output channels over inner channels."""


class PreActBottleneck(nn.Module):
    """BatchNorm-ReLU-1x1, BatchNorm-ReLU-3x3, BatchNorm-ReLU-1x1, plus the shortcut.

    The shortcut is the raw block input; the first block of every stage passes it through a bias-free 1x1
    convolution.
    """

    def __init__(self, in_channels: int, planes: int, stride: int) -> None:
        super().__init__()
        out_channels = planes * EXPANSION
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, planes, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride=stride, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, out_channels, 1, bias=False)
        changes_width = in_channels != out_channels
        self.project = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False) if changes_width else None

    def forward(self, x: Tensor) -> Tensor:
        branch = self.conv1(F.relu(self.bn1(x)))
        branch = self.conv2(F.relu(self.bn2(branch)))
        branch = self.conv3(F.relu(self.bn3(branch)))
        shortcut = x if self.project is None else self.project(x)
        return shortcut + branch


class BottleneckResNet(nn.Module):
    """3x3 stem without BatchNorm, three stages of `PreActBottleneck`, BatchNorm-ReLU, pool, linear."""

    def __init__(self, blocks_per_stage: int, num_classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.stages = nn.ModuleList()
        width = 16
        for planes, stride in ((16, 1), (32, 2), (64, 2)):
            blocks = []
            for index in range(blocks_per_stage):
                blocks.append(PreActBottleneck(width, planes, stride if index == 0 else 1))
                width = planes * EXPANSION
            self.stages.append(nn.Sequential(*blocks))
        self.bn = nn.BatchNorm2d(width)
        self.classifier = nn.Linear(width, num_classes)
        init_scp_(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        x = F.relu(self.bn(x))
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        return self.classifier(x)


def resnet164(num_classes: int = 10) -> BottleneckResNet:
    """Pre-activation bottleneck ResNet-164 for CIFAR."""
    return BottleneckResNet(18, num_classes)
