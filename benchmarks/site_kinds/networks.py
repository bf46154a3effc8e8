"""Networks for CIFAR whose residual streams are written by several BatchNorms: a ResNet-56 and MobileNetV2."""

import itertools

import torch.nn.functional as F
from torch import Tensor, nn

INVERTED = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""Expansion, channels, blocks and stride of each stage of MobileNetV2; the stem and the second stage keep 32 x 32."""


def conv_norm(inputs: int, outputs: int, size: int, *, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Return a convolution without bias and its BatchNorm."""
    conv = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, ReLU after the sum, as in ResNet-18."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.first, self.second = conv_norm(inputs, outputs, 3, stride=stride), conv_norm(outputs, outputs, 3)
        self.shortcut = nn.Identity() if stride == 1 else conv_norm(inputs, outputs, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))


class InvertedResidual(nn.Module):
    """1x1 expansion, 3x3 depthwise convolution, 1x1 projection without an activation."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = expansion * inputs
        layers = [] if expansion == 1 else [conv_norm(inputs, inner, 1), nn.ReLU6()]
        layers += [conv_norm(inner, inner, 3, stride=stride, groups=inner), nn.ReLU6(), conv_norm(inner, outputs, 1)]
        self.layers = nn.Sequential(*layers)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.residual else self.layers(x)


class Classifier(nn.Module):
    """Features, average pooling, a linear layer."""

    def __init__(self, features: list[nn.Module], width: int, num_classes: int) -> None:
        super().__init__()
        self.features, self.classifier = nn.Sequential(*features), nn.Linear(width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


def resnet56(num_classes: int = 10) -> Classifier:
    """Post-activation ResNet-56 with 1x1 convolutions as shortcuts between its stages."""
    widths = [16, *(width for width in (16, 32, 64) for _ in range(9))]
    blocks = [BasicBlock(inputs, outputs) for inputs, outputs in itertools.pairwise(widths)]
    return Classifier([conv_norm(3, 16, 3), nn.ReLU(), *blocks], 64, num_classes)


def mobilenet_v2(num_classes: int = 10) -> Classifier:
    """MobileNetV2 with strides for images of 32 x 32."""
    layers, width = [conv_norm(3, 32, 3), nn.ReLU6()], 32
    for expansion, outputs, blocks, first_stride in INVERTED:
        for index in range(blocks):
            layers.append(InvertedResidual(width, outputs, first_stride if index == 0 else 1, expansion))
            width = outputs
    return Classifier([*layers, conv_norm(width, 1280, 1), nn.ReLU6()], 1280, num_classes)
