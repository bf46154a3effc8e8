"""ResNets for CIFAR, and ResNet-18 and ResNet-50 for ImageNet.

CIFAR networks have three stages of 16, 32 and 64 planes: pre-activation blocks as in SCP, bottlenecks as in Slimming,
and option-A shortcuts as in SFP, FPGM and L1. ImageNet networks are v1.5 (the stride is in the 3x3 convolution of a
bottleneck) and use torchvision's parameter names, so that they can load torchvision's weights.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from softprune.models.init import init_post_activation_, init_scp_


def _conv(in_channels: int, out_channels: int, kernel: int = 3, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, kernel, stride=stride, padding=kernel // 2, bias=False)


class PreActBlock(nn.Module):
    """BatchNorm-ReLU-3x3, BatchNorm-ReLU-3x3, plus the shortcut.

    In the first block of a stage (`first`), the shortcut starts after the first BatchNorm and ReLU, which both paths
    share, and if the stage halves the resolution, it has a 1x1 convolution without bias. In other blocks, the shortcut
    is the input of the block.
    """

    expansion = 1
    """Ratio of output channels to planes."""

    def __init__(self, in_channels: int, planes: int, *, first: bool) -> None:
        super().__init__()
        stride = 1 if in_channels == planes else 2
        self.first = first
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = _conv(in_channels, planes, stride=stride)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv2 = _conv(planes, planes)
        self.project = None if stride == 1 else _conv(in_channels, planes, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        activated = F.relu(self.bn1(x))
        shortcut = activated if self.first else x
        if self.project is not None:
            shortcut = self.project(shortcut)
        return shortcut + self.conv2(F.relu(self.bn2(self.conv1(activated))))


class PreActBottleneck(nn.Module):
    """BatchNorm-ReLU-1x1, BatchNorm-ReLU-3x3, BatchNorm-ReLU-1x1, plus the shortcut.

    The shortcut is the input of the block, with a 1x1 convolution without bias in the first block of a stage.
    """

    expansion = 4

    def __init__(self, in_channels: int, planes: int, *, first: bool) -> None:
        super().__init__()
        stride = 2 if first and planes > 16 else 1
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = _conv(in_channels, planes, 1)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv2 = _conv(planes, planes, stride=stride)
        self.bn3 = nn.BatchNorm2d(planes)
        self.conv3 = _conv(planes, 4 * planes, 1)
        self.project = _conv(in_channels, 4 * planes, 1, stride) if first else None

    def forward(self, x: Tensor) -> Tensor:
        branch = self.conv1(F.relu(self.bn1(x)))
        branch = self.conv2(F.relu(self.bn2(branch)))
        branch = self.conv3(F.relu(self.bn3(branch)))
        return (x if self.project is None else self.project(x)) + branch


class PadShortcut(nn.Module):
    """Option-A shortcut: subsample every second pixel and append zero channels."""

    def __init__(self, in_channels: int, planes: int) -> None:
        super().__init__()
        self.new_channels = planes - in_channels

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.new_channels))


def _projection(in_channels: int, out_channels: int, stride: int = 2) -> nn.Module:
    return nn.Sequential(_conv(in_channels, out_channels, 1, stride), nn.BatchNorm2d(out_channels))


class BasicBlock(nn.Module):
    """3x3-BatchNorm-ReLU, 3x3-BatchNorm, plus the shortcut, ReLU."""

    expansion = 1
    shortcut: Callable[[int, int], nn.Module] = staticmethod(_projection)
    """Builds the shortcut of a block that halves the resolution."""

    def __init__(self, in_channels: int, planes: int, *, first: bool) -> None:
        super().__init__()
        self.conv1 = _conv(in_channels, planes, stride=1 if in_channels == planes else 2)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = _conv(planes, planes)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = None if in_channels == planes else self.shortcut(in_channels, planes)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(branch + (x if self.downsample is None else self.downsample(x)))


class OptionABlock(BasicBlock):
    """BasicBlock with option-A shortcuts."""

    shortcut = PadShortcut


class Bottleneck(nn.Module):
    """1x1-BatchNorm-ReLU, 3x3-BatchNorm-ReLU, 1x1-BatchNorm, plus the shortcut, ReLU."""

    expansion = 4

    def __init__(self, in_channels: int, planes: int, *, first: bool) -> None:
        super().__init__()
        stride = 2 if first and planes > 64 else 1
        self.conv1 = _conv(in_channels, planes, 1)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = _conv(planes, planes, stride=stride)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = _conv(planes, 4 * planes, 1)
        self.bn3 = nn.BatchNorm2d(4 * planes)
        self.downsample = _projection(in_channels, 4 * planes, stride) if first else None

    def forward(self, x: Tensor) -> Tensor:
        branch = F.relu(self.bn1(self.conv1(x)))
        branch = F.relu(self.bn2(self.conv2(branch)))
        branch = self.bn3(self.conv3(branch))
        return F.relu(branch + (x if self.downsample is None else self.downsample(x)))


def _stages(block: Any, depths: Sequence[int], planes: int = 16) -> nn.ModuleList:
    """Return stages of `depths` blocks; `planes`, the width of the stem and of the first stage, doubles per stage."""
    stages, width = nn.ModuleList(), planes
    for depth in depths:
        blocks = []
        for index in range(depth):
            blocks.append(block(width, planes, first=index == 0))
            width = planes * block.expansion
        stages.append(nn.Sequential(*blocks))
        planes *= 2
    return stages


class PreActResNet(nn.Module):
    """3x3 stem without BatchNorm, three stages of `PreActBlock`, BatchNorm-ReLU, average pool, linear."""

    block: type[PreActBlock] | type[PreActBottleneck] = PreActBlock

    def __init__(self, blocks_per_stage: int, num_classes: int = 10) -> None:
        super().__init__()
        self.stem = _conv(3, 16)
        self.stages = _stages(self.block, [blocks_per_stage] * 3)
        self.bn = nn.BatchNorm2d(64 * self.block.expansion)
        self.classifier = nn.Linear(64 * self.block.expansion, num_classes)
        init_scp_(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        x = F.relu(self.bn(x))
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        return self.classifier(x)


class BottleneckResNet(PreActResNet):
    """PreActResNet with stages of `PreActBottleneck`."""

    block = PreActBottleneck


class OptionAResNet(nn.Module):
    """3x3 stem with BatchNorm-ReLU, three stages of `OptionABlock` (16, 32, 64), average pool, linear."""

    def __init__(self, blocks_per_stage: int, num_classes: int = 10) -> None:
        super().__init__()
        self.stem = _conv(3, 16)
        self.bn = nn.BatchNorm2d(16)
        self.stages = _stages(OptionABlock, [blocks_per_stage] * 3)
        self.classifier = nn.Linear(64, num_classes)
        init_post_activation_(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.stem(x)))
        for stage in self.stages:
            x = stage(x)
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        return self.classifier(x)


class ResNet(nn.Module):
    """7x7 stem, max-pool, four stages of 64, 128, 256, 512 planes, average pool, linear.

    `small_images` replaces the stem by a 3x3 convolution of stride 1, for images of 64 x 64 pixels.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: Sequence[int],
        num_classes: int = 1000,
        *,
        small_images: bool = False,
    ) -> None:
        super().__init__()
        self.conv1 = _conv(3, 64) if small_images else _conv(3, 64, 7, 2)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1, self.layer2, self.layer3, self.layer4 = _stages(block, depths, 64)
        self.fc = nn.Linear(512 * block.expansion, num_classes)
        init_post_activation_(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.max_pool2d(x, 3, stride=2, padding=1)
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        return self.fc(x)


resnet20 = partial(PreActResNet, 3)
resnet56 = partial(PreActResNet, 9)
resnet110 = partial(PreActResNet, 18)
resnet164 = partial(BottleneckResNet, 18)
resnet56_a = partial(OptionAResNet, 9)
resnet110_a = partial(OptionAResNet, 18)
resnet18 = partial(ResNet, BasicBlock, (2, 2, 2, 2))
resnet50 = partial(ResNet, Bottleneck, (3, 4, 6, 3))
resnet50_64 = partial(resnet50, num_classes=100, small_images=True)
