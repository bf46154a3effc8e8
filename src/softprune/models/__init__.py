"""The networks of the SCP paper and of the methods it compares with, and a small default.

Each is a function ``NAME(num_classes=...)`` that returns an ordinary ``nn.Module``. The networks contain no pruning
code.
"""

from softprune.models.densenet import DenseNet, densenet40
from softprune.models.registry import REGISTRY, ModelEntry, build
from softprune.models.resnet_cifar import (
    BottleneckResNet,
    OptionAResNet,
    PreActResNet,
    resnet20,
    resnet56,
    resnet56_a,
    resnet110,
    resnet110_a,
    resnet164,
)
from softprune.models.resnet_imagenet import ResNet, resnet18, resnet50, resnet50_64
from softprune.models.vgg import VGG, digits_net, vgg16, vgg19

__all__ = [
    "REGISTRY",
    "VGG",
    "BottleneckResNet",
    "DenseNet",
    "ModelEntry",
    "OptionAResNet",
    "PreActResNet",
    "ResNet",
    "build",
    "densenet40",
    "digits_net",
    "resnet18",
    "resnet20",
    "resnet50",
    "resnet50_64",
    "resnet56",
    "resnet56_a",
    "resnet110",
    "resnet110_a",
    "resnet164",
    "vgg16",
    "vgg19",
]
