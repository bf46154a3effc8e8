"""The networks by name, for the command line, recipes, tests and documents."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from softprune.errors import check_choice, check_types
from softprune.models.densenet import densenet40
from softprune.models.resnet_cifar import resnet20, resnet56, resnet56_a, resnet110, resnet110_a, resnet164
from softprune.models.resnet_imagenet import resnet18, resnet50, resnet50_64
from softprune.models.vgg import digits_net, vgg16, vgg19


@dataclass(frozen=True)
class ModelEntry:
    """One network of the library."""

    build: Callable[..., nn.Module]
    """Called as ``build(num_classes=...)``."""
    size: int
    """Side of its images."""
    description: str
    """One line for lists."""
    channels: int = 3

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of its images."""
        return self.channels, self.size, self.size


REGISTRY: dict[str, ModelEntry] = {
    "digits_net": ModelEntry(digits_net, 8, "six convolutions in VGG style, for the embedded digits", channels=1),
    "vgg16": ModelEntry(vgg16, 32, "VGG-16 with BatchNorm, for CIFAR"),
    "vgg19": ModelEntry(vgg19, 32, "VGG-19 with BatchNorm, for CIFAR"),
    "resnet20": ModelEntry(resnet20, 32, "pre-activation ResNet-20 as in SCP, for CIFAR"),
    "resnet56": ModelEntry(resnet56, 32, "pre-activation ResNet-56 as in SCP, for CIFAR"),
    "resnet110": ModelEntry(resnet110, 32, "pre-activation ResNet-110 as in SCP, for CIFAR"),
    "resnet164": ModelEntry(resnet164, 32, "pre-activation bottleneck ResNet-164 as in Slimming, for CIFAR"),
    "densenet40": ModelEntry(densenet40, 32, "DenseNet-40, growth 12, for CIFAR"),
    "resnet56_a": ModelEntry(resnet56_a, 32, "post-activation ResNet-56, option-A shortcuts, for CIFAR"),
    "resnet110_a": ModelEntry(resnet110_a, 32, "post-activation ResNet-110, option-A shortcuts, for CIFAR"),
    "resnet18": ModelEntry(resnet18, 224, "ResNet-18, for ImageNet"),
    "resnet50": ModelEntry(resnet50, 224, "ResNet-50 (v1.5), for ImageNet"),
    "resnet50_64": ModelEntry(resnet50_64, 64, "ResNet-50 (v1.5) with a 3x3 stem, for Tiny-ImageNet"),
}
"""Every network by the name of its function in `softprune.models`."""


@check_types
def build(name: str, num_classes: int) -> nn.Module:
    """Build the network called `name` with freshly drawn weights.

    Raises `ConfigError` for an unknown name or a number of classes below one.
    """
    check_choice("A model", name, REGISTRY)
    return REGISTRY[name].build(num_classes=num_classes)
