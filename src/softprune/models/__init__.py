"""The networks of the SCP paper and of the methods it compares with, and a small default.

Each is a function ``NAME(num_classes=...)`` that returns an ordinary ``nn.Module``. The networks contain no pruning
code.
"""

from softprune.models.densenet import DenseNet as DenseNet
from softprune.models.densenet import densenet40 as densenet40
from softprune.models.registry import REGISTRY as REGISTRY
from softprune.models.registry import ModelEntry as ModelEntry
from softprune.models.registry import build as build
from softprune.models.resnet_cifar import BottleneckResNet as BottleneckResNet
from softprune.models.resnet_cifar import OptionAResNet as OptionAResNet
from softprune.models.resnet_cifar import PreActResNet as PreActResNet
from softprune.models.resnet_cifar import resnet20 as resnet20
from softprune.models.resnet_cifar import resnet56 as resnet56
from softprune.models.resnet_cifar import resnet56_a as resnet56_a
from softprune.models.resnet_cifar import resnet110 as resnet110
from softprune.models.resnet_cifar import resnet110_a as resnet110_a
from softprune.models.resnet_cifar import resnet164 as resnet164
from softprune.models.resnet_imagenet import ResNet as ResNet
from softprune.models.resnet_imagenet import resnet18 as resnet18
from softprune.models.resnet_imagenet import resnet50 as resnet50
from softprune.models.resnet_imagenet import resnet50_64 as resnet50_64
from softprune.models.vgg import VGG as VGG
from softprune.models.vgg import digits_net as digits_net
from softprune.models.vgg import vgg16 as vgg16
from softprune.models.vgg import vgg19 as vgg19
