"""The dense networks cost what the networks of the papers cost."""

import pytest
import torch
from paper.counting import Counted, PaperCounter
from torch import nn

from softprune import models
from softprune.costs import cost

# name, classes, SCP-FLOPs (None: the authors have no rule), parameters, channels, conv + fc MACs
ROWS = [
    ("digits_net", 10, None, 288_170, 448, 2_379_008),
    ("vgg16", 10, 626_956_268, 14_724_042, 4_224, 313_201_664),
    ("vgg16", 100, 627_048_248, 14_770_212, 4_224, 313_247_744),
    ("vgg19", 10, 796_878_828, 20_035_018, 5_504, 398_136_320),
    ("resnet56", 10, 252_585_196, 855_578, 2_032, 125_747_840),
    ("resnet20", 10, 82_027_756, 272_282, 688, 40_813_184),
    ("resnet110", 10, 508_421_356, 1_730_522, 4_048, 253_149_824),
    ("densenet40", 10, 566_774_668, 1_059_298, 9_360, 282_917_328),
    ("densenet40-16", 10, 530_529_004, 1_019_722, 9_048, 264_812_928),
    ("resnet164", 10, 501_822_444, 1_703_258, 12_112, 247_646_720),
    ("resnet56_a", 10, None, 853_018, 2_032, 125_485_696),
    ("resnet110_a", 10, None, 1_727_962, 4_048, 252_887_680),
    # The published sizes of the ImageNet networks.
    ("resnet18", 1000, None, 11_689_512, 4_800, 1_814_073_344),
    ("resnet50", 1000, None, 25_557_032, 26_560, 4_089_184_256),
    # The same with a 3x3 stem of stride 1, 64 x 64 images and 100 classes.
    ("resnet50_64", 100, None, 23_705_252, 26_560, 1_303_322_624),
]


def _build(name: str, classes: int) -> nn.Module:
    with torch.device("meta"):  # counts need shapes only
        if name == "densenet40-16":
            return models.densenet40(classes, stem_channels=16)
        return models.build(name, classes)


@pytest.mark.parametrize(("name", "classes", "flops", "params", "channels", "macs"), ROWS)
def test_dense_counts(name: str, classes: int, flops: int | None, params: int, channels: int, macs: int) -> None:
    model = _build(name, classes)
    shape = models.REGISTRY[name.removesuffix("-16")].input_shape
    assert sum(p.numel() for p in model.parameters()) == params
    example = torch.empty(1, *shape)
    exact = cost(model, example)
    assert (exact.params, exact.channels, exact.macs) == (params, channels, macs)
    if flops is not None:
        assert PaperCounter(model, example).count() == Counted(flops, params, channels)
