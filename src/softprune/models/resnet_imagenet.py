"""ResNet-18 and ResNet-50 for ImageNet (v1.5: the 3x3 convolution of a bottleneck has its stride).

Parameter names are torchvision's, so weights published for its ResNets load into these.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from softprune.errors import check_types
from softprune.models.init import classifier, init_post_activation_


def _projection(in_channels: int, out_channels: int, stride: int) -> nn.Sequential | None:
    """1x1 convolution and BatchNorm on the shortcut, where the branch changes its shape."""
    if stride == 1 and in_channels == out_channels:
        return None
    conv = nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out_channels))


class BasicBlock(nn.Module):
    """3x3-BatchNorm-ReLU, 3x3-BatchNorm, plus the shortcut, ReLU."""

    expansion = 1

    def __init__(self, in_channels: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, planes, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = _projection(in_channels, planes, stride)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        shortcut = x if self.downsample is None else self.downsample(x)
        return F.relu(branch + shortcut)


class Bottleneck(nn.Module):
    """1x1-BatchNorm-ReLU, 3x3-BatchNorm-ReLU, 1x1-BatchNorm, plus the shortcut, ReLU."""

    expansion = 4

    def __init__(self, in_channels: int, planes: int, stride: int) -> None:
        super().__init__()
        out_channels = planes * self.expansion
        self.conv1 = nn.Conv2d(in_channels, planes, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.downsample = _projection(in_channels, out_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        branch = F.relu(self.bn1(self.conv1(x)))
        branch = F.relu(self.bn2(self.conv2(branch)))
        branch = self.bn3(self.conv3(branch))
        shortcut = x if self.downsample is None else self.downsample(x)
        return F.relu(branch + shortcut)


BlockType = type[BasicBlock] | type[Bottleneck]


def _stage(block: BlockType, in_channels: int, planes: int, depth: int, stride: int) -> nn.Sequential:
    """`depth` blocks, of which the first changes width and resolution."""
    blocks = [block(in_channels, planes, stride)]
    blocks += [block(planes * block.expansion, planes, 1) for _ in range(depth - 1)]
    return nn.Sequential(*blocks)


class ResNet(nn.Module):
    """7x7 stem, max-pool, four stages of 64, 128, 256, 512 planes, average pool, linear.

    `small_images` takes a 3x3 stem of stride 1 instead, which suits images of 64 x 64.
    """

    @check_types
    def __init__(
        self, block: BlockType, depths: Sequence[int], num_classes: int = 1000, *, small_images: bool = False
    ) -> None:
        super().__init__()
        kernel, stride = (3, 1) if small_images else (7, 2)
        self.conv1 = nn.Conv2d(3, 64, kernel, stride=stride, padding=kernel // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = _stage(block, 64, 64, depths[0], stride=1)
        self.layer2 = _stage(block, 64 * block.expansion, 128, depths[1], stride=2)
        self.layer3 = _stage(block, 128 * block.expansion, 256, depths[2], stride=2)
        self.layer4 = _stage(block, 256 * block.expansion, 512, depths[3], stride=2)
        self.fc = classifier(512 * block.expansion, num_classes)
        init_post_activation_(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.max_pool2d(x, 3, stride=2, padding=1)
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        return self.fc(x)


def resnet18(num_classes: int = 1000) -> ResNet:
    """ResNet-18 for ImageNet."""
    return ResNet(BasicBlock, (2, 2, 2, 2), num_classes)


def resnet50(num_classes: int = 1000) -> ResNet:
    """ResNet-50 for ImageNet."""
    return ResNet(Bottleneck, (3, 4, 6, 3), num_classes)


def resnet50_64(num_classes: int = 100) -> ResNet:
    """ResNet-50 with a stem for 64 x 64 images, such as Tiny-ImageNet's."""
    return ResNet(Bottleneck, (3, 4, 6, 3), num_classes, small_images=True)
