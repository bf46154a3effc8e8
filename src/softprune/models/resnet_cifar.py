"""ResNets for CIFAR: pre-activation as in SCP, bottlenecks as in Slimming, option A as in SFP, FPGM and L1.

All have three stages of 16, 32 and 64 channels (planes), a 3x3 stem, average pooling and a linear classifier.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from softprune.errors import check_types
from softprune.models.init import classifier, init_post_activation_, init_scp_

EXPANSION = 4
"""Output channels of a bottleneck block over its inner channels."""


class PreActBlock(nn.Module):
    """BatchNorm-ReLU-3x3, BatchNorm-ReLU-3x3, plus the shortcut.

    In the first block of every stage (`first`) the shortcut starts after the first BatchNorm and ReLU, so
    that these feed both paths. Where the stage halves the resolution it passes through a bias-free 1x1 convolution.
    In the other blocks the shortcut is the input of the block.
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

    expansion = 1
    """Output channels of a block over its planes."""

    @check_types
    def __init__(self, blocks_per_stage: int, num_classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.stages = nn.ModuleList()
        width = 16
        for planes in (16, 32, 64):
            blocks = []
            for index in range(blocks_per_stage):
                blocks.append(self._block(width, planes, first=index == 0))
                width = planes * self.expansion
            self.stages.append(nn.Sequential(*blocks))
        self.bn = nn.BatchNorm2d(width)
        self.classifier = classifier(width, num_classes)
        init_scp_(self)

    def _block(self, in_channels: int, planes: int, *, first: bool) -> nn.Module:
        return PreActBlock(in_channels, planes, first=first)

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


class PreActBottleneck(nn.Module):
    """BatchNorm-ReLU-1x1, BatchNorm-ReLU-3x3, BatchNorm-ReLU-1x1, plus the shortcut.

    The shortcut is the input of the block; in the first block of every stage it passes through a bias-free 1x1
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


class BottleneckResNet(PreActResNet):
    """The same with stages of `PreActBottleneck`."""

    expansion = EXPANSION

    def _block(self, in_channels: int, planes: int, *, first: bool) -> nn.Module:
        return PreActBottleneck(in_channels, planes, stride=2 if first and planes > 16 else 1)


def resnet164(num_classes: int = 10) -> BottleneckResNet:
    """Pre-activation bottleneck ResNet-164 for CIFAR."""
    return BottleneckResNet(18, num_classes)


class OptionABlock(nn.Module):
    """3x3-BatchNorm-ReLU, 3x3-BatchNorm, plus the shortcut, ReLU.

    Where the stage halves the resolution, the shortcut takes every second pixel and appends zero channels.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.stride = 1 if in_channels == out_channels else 2
        self.new_channels = out_channels - in_channels
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=self.stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.stride != 1:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))
        return F.relu(x + branch)


class OptionAResNet(nn.Module):
    """3x3 stem with BatchNorm-ReLU, three stages of `OptionABlock` (16, 32, 64), average pool, linear."""

    @check_types
    def __init__(self, blocks_per_stage: int, num_classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        self.stages = nn.ModuleList()
        width = 16
        for out_channels in (16, 32, 64):
            blocks = []
            for _ in range(blocks_per_stage):
                blocks.append(OptionABlock(width, out_channels))
                width = out_channels
            self.stages.append(nn.Sequential(*blocks))
        self.classifier = classifier(width, num_classes)
        init_post_activation_(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.stem(x)))
        for stage in self.stages:
            x = stage(x)
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        return self.classifier(x)


def resnet56_a(num_classes: int = 10) -> OptionAResNet:
    """Post-activation ResNet-56 for CIFAR with option-A shortcuts."""
    return OptionAResNet(9, num_classes)


def resnet110_a(num_classes: int = 10) -> OptionAResNet:
    """Post-activation ResNet-110 for CIFAR with option-A shortcuts."""
    return OptionAResNet(18, num_classes)
