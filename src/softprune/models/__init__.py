"""The networks of the SCP paper and of the methods it compares with, and a small default network.

``NAME(num_classes=...)`` builds an ordinary ``nn.Module`` without any pruning code.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from softprune.errors import ConfigError, check_choice
from softprune.models.densenet import DenseNet, densenet40
from softprune.models.resnet import (
    BottleneckResNet,
    OptionAResNet,
    PreActResNet,
    ResNet,
    resnet18,
    resnet20,
    resnet50,
    resnet50_64,
    resnet56,
    resnet56_a,
    resnet110,
    resnet110_a,
    resnet164,
)
from softprune.models.vgg import VGG, digits_net, vgg16, vgg19

__all__ = ["REGISTRY", "ModelEntry", "build", "densenet40", "digits_net", "resnet18", "resnet20", "vgg16", "vgg19"]
__all__ += ["resnet50", "resnet50_64", "resnet56", "resnet56_a", "resnet110", "resnet110_a", "resnet164"]
__all__ += ["VGG", "BottleneckResNet", "DenseNet", "OptionAResNet", "PreActResNet", "ResNet"]


@dataclass(frozen=True)
class ModelEntry:
    """A network of the registry."""

    build: Callable[..., nn.Module]
    """Called as ``build(num_classes=...)``."""
    input_shape: tuple[int, int, int]
    """Shape (C, H, W) of its input."""
    description: str
    """One-line description."""


REGISTRY: dict[str, ModelEntry] = {
    "digits_net": ModelEntry(digits_net, (1, 8, 8), "VGG-style network of six convolutions, for the bundled digits"),
    "vgg16": ModelEntry(vgg16, (3, 32, 32), "VGG-16 with BatchNorm, for CIFAR"),
    "vgg19": ModelEntry(vgg19, (3, 32, 32), "VGG-19 with BatchNorm, for CIFAR"),
    "resnet20": ModelEntry(resnet20, (3, 32, 32), "pre-activation ResNet-20 as in SCP, for CIFAR"),
    "resnet56": ModelEntry(resnet56, (3, 32, 32), "pre-activation ResNet-56 as in SCP, for CIFAR"),
    "resnet110": ModelEntry(resnet110, (3, 32, 32), "pre-activation ResNet-110 as in SCP, for CIFAR"),
    "resnet164": ModelEntry(resnet164, (3, 32, 32), "pre-activation bottleneck ResNet-164 as in Slimming, for CIFAR"),
    "densenet40": ModelEntry(densenet40, (3, 32, 32), "DenseNet-40, growth 12, for CIFAR"),
    "resnet56_a": ModelEntry(resnet56_a, (3, 32, 32), "post-activation ResNet-56, option-A shortcuts, for CIFAR"),
    "resnet110_a": ModelEntry(resnet110_a, (3, 32, 32), "post-activation ResNet-110, option-A shortcuts, for CIFAR"),
    "resnet18": ModelEntry(resnet18, (3, 224, 224), "ResNet-18, for ImageNet"),
    "resnet50": ModelEntry(resnet50, (3, 224, 224), "ResNet-50 (v1.5), for ImageNet"),
    "resnet50_64": ModelEntry(resnet50_64, (3, 64, 64), "ResNet-50 (v1.5) with a 3x3 stem, for Tiny-ImageNet"),
}
"""All networks by name."""


def build(name: str, num_classes: int) -> nn.Module:
    """Build the network `name` with random weights.

    Raises `ConfigError` for an unknown name or fewer than one class.
    """
    check_choice("A model", name, REGISTRY)
    if num_classes < 1:
        raise ConfigError(f"`num_classes` must be at least 1. Got {num_classes}; pass the number of classes.")
    return REGISTRY[name].build(num_classes=num_classes)
