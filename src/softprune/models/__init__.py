"""The networks of the SCP paper and of the methods it compares with, plus a small default.

Each is a function ``NAME(num_classes=...)`` that returns an ordinary ``nn.Module``; the networks know nothing
of pruning.
"""

from softprune.models.densenet import DenseNet, densenet40
from softprune.models.digits_net import digits_net
from softprune.models.registry import REGISTRY, ModelEntry, build
from softprune.models.resnet_bottleneck import BottleneckResNet, resnet164
from softprune.models.resnet_imagenet import ResNet, resnet18, resnet50
from softprune.models.resnet_postact import OptionAResNet, resnet56_a, resnet110_a
from softprune.models.resnet_preact import PreActResNet, resnet20, resnet56, resnet110
from softprune.models.vgg import VGG, vgg16, vgg19

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
    "resnet56",
    "resnet56_a",
    "resnet110",
    "resnet110_a",
    "resnet164",
    "vgg16",
    "vgg19",
]
