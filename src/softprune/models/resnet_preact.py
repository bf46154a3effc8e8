"""Pre-activation ResNets for CIFAR as in the SCP authors' code: basic blocks, three stages of 16, 32, 64."""

import torch.nn.functional as F
from torch import Tensor, nn

from softprune.models.init import init_scp_


class PreActBlock(nn.Module):
    """BatchNorm-ReLU-3x3, BatchNorm-ReLU-3x3, plus the shortcut.

    In the first block of every stage (`first`) the shortcut starts behind the first BatchNorm and ReLU, so
    these feed both paths; it goes through a bias-free 1x1 convolution where the stage halves the resolution,
    and through nothing in the first stage. In the other blocks the shortcut is the raw input.
    """

    def __init__(self, in_channels: int, out_channels: int, *, first: bool) -> None:
        super().__init__()
        stride = 1 if in_channels == out_channels else 2
        self.first = first
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.project = None if stride == 1 else nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        activated = F.relu(self.bn1(x))
        shortcut = activated if self.first else x
        if self.project is not None:
            shortcut = self.project(shortcut)
        branch = self.conv2(F.relu(self.bn2(self.conv1(activated))))
        return shortcut + branch


class PreActResNet(nn.Module):
    """3x3 stem without BatchNorm, three stages of `PreActBlock`, BatchNorm-ReLU, average pool, linear."""

    def __init__(self, blocks_per_stage: int, num_classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.stages = nn.ModuleList()
        width = 16
        for out_channels in (16, 32, 64):
            blocks = []
            for index in range(blocks_per_stage):
                blocks.append(PreActBlock(width, out_channels, first=index == 0))
                width = out_channels
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


def resnet20(num_classes: int = 10) -> PreActResNet:
    """Pre-activation ResNet-20 for CIFAR."""
    return PreActResNet(3, num_classes)


def resnet56(num_classes: int = 10) -> PreActResNet:
    """Pre-activation ResNet-56 for CIFAR, the paper's."""
    return PreActResNet(9, num_classes)


def resnet110(num_classes: int = 10) -> PreActResNet:
    """Pre-activation ResNet-110 for CIFAR."""
    return PreActResNet(18, num_classes)
