"""VGG with BatchNorm for small images: 3x3 convolutions, max-pools, one linear layer."""

from collections.abc import Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from softprune.models.init import init_scp_, truncated_normal_


class ConvUnit(nn.Module):
    """3x3 convolution without bias, BatchNorm, ReLU."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


class VGG(nn.Module):
    """Stages of 3x3 convolutions separated by 2x2 max-pools, global average pooling, a linear classifier.

    `widths` gives the output channels of every convolution, stage by stage.
    """

    def __init__(self, widths: Sequence[Sequence[int]], num_classes: int = 10, in_channels: int = 3) -> None:
        super().__init__()
        self.stages = nn.ModuleList()
        width = in_channels
        for stage_widths in widths:
            units = []
            for out_channels in stage_widths:
                units.append(ConvUnit(width, out_channels))
                width = out_channels
            self.stages.append(nn.Sequential(*units))
        self.classifier = nn.Linear(width, num_classes)
        init_scp_(self)
        # The authors initialise the classifier of VGG differently.
        truncated_normal_(self.classifier.weight, 0.01)

    def forward(self, x: Tensor) -> Tensor:
        for index, stage in enumerate(self.stages):
            if index > 0:
                x = F.max_pool2d(x, 2)
            x = stage(x)
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        return self.classifier(x)


vgg16 = partial(VGG, [[64] * 2, [128] * 2, [256] * 3, [512] * 3, [512] * 3])
vgg19 = partial(VGG, [[64] * 2, [128] * 2, [256] * 4, [512] * 4, [512] * 4])
digits_net = partial(VGG, [[32] * 2, [64] * 2, [128] * 2], in_channels=1)
