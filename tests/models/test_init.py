"""Fresh weights follow the papers' distributions."""

import math

import pytest
import torch
from torch import nn

from softprune import models


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("name", ["digits_net", "resnet20", "densenet40"])
def test_authors_initialisation(name: str) -> None:
    model = models.build(name, 10)
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 4000:
            std = math.sqrt(2 / (module.in_channels * math.prod(module.kernel_size)))
            assert module.weight.std().item() == pytest.approx(std, rel=0.06)
            # Truncated at two standard deviations of the normal before the truncation.
            assert module.weight.abs().max().item() <= 2 * std / 0.8796
            assert module.bias is None
        if isinstance(module, nn.BatchNorm2d):
            assert (module.weight == 1).all()
            assert (module.bias == 0).all()
    assert (model.classifier.bias == 0).all()


def test_vgg_classifier_starts_small() -> None:
    weight = models.digits_net(100).classifier.weight
    assert weight.std().item() == pytest.approx(0.0088, rel=0.03)
    assert weight.abs().max().item() <= 0.02


def test_resnet_classifier_is_he_normal() -> None:
    weight = models.resnet20(100).classifier.weight
    assert weight.std().item() == pytest.approx(math.sqrt(2 / 64), rel=0.05)


@pytest.mark.parametrize("name", ["resnet56_a", "resnet18"])
def test_post_activation_initialisation(name: str) -> None:
    model = models.build(name, 10)
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 4000:
            std = math.sqrt(2 / (module.out_channels * math.prod(module.kernel_size)))
            assert module.weight.std().item() == pytest.approx(std, rel=0.06)
