"""Post-activation ResNets for CIFAR with parameter-free (option A) shortcuts, as in SFP, FPGM and L1."""

import torch.nn.functional as F
from torch import Tensor, nn

from softprune.models.init import init_post_activation_


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
        self.classifier = nn.Linear(width, num_classes)
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
