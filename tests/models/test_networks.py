"""The networks compute what their papers describe, and their modules have the promised names."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softprune import models
from softprune.errors import ConfigError


@pytest.mark.parametrize("name", models.REGISTRY)
def test_forward_shape(name: str) -> None:
    with torch.device("meta"):
        out = models.build(name, num_classes=7)(torch.empty(2, *models.REGISTRY[name].input_shape))
    assert out.shape == (2, 7)


@pytest.mark.parametrize("name", models.REGISTRY)
def test_registry_names_are_functions_of_the_package(name: str) -> None:
    entry = models.REGISTRY[name]
    assert getattr(models, name) is entry.build
    assert name in models.__all__
    assert entry.description


def test_build_names_the_nearest_model() -> None:
    with pytest.raises(ConfigError, match=r"Got 'resnet_56'. Did you mean 'resnet56'"):
        models.build("resnet_56", 10)


def test_a_network_has_at_least_one_class() -> None:
    with pytest.raises(ConfigError, match="num_classes"):
        models.build("digits_net", 0)


def _randomise_norms_(model: nn.Module) -> nn.Module:
    """Make every BatchNorm matter: a fresh one in eval mode is nearly the identity."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1.0, 0.3)
            nn.init.normal_(module.bias, 0.0, 0.3)
            nn.init.normal_(module.running_mean, 0.0, 0.3)
    return model.double().eval()


def _preact_by_hand(model: nn.Module, x: Tensor) -> Tensor:
    m = dict(model.named_modules())
    x = m["stem"](x)
    for stage in range(3):
        for block in range(3):
            at = f"stages.{stage}.{block}."
            activated = m[at + "bn1"](x).clamp(min=0)
            if block > 0:
                shortcut = x
            elif stage == 0:
                shortcut = activated
            else:
                shortcut = m[at + "project"](activated)
            x = shortcut + m[at + "conv2"](m[at + "bn2"](m[at + "conv1"](activated)).clamp(min=0))
    return m["classifier"](m["bn"](x).clamp(min=0).mean((2, 3)))


def _option_a_by_hand(model: nn.Module, x: Tensor) -> Tensor:
    m = dict(model.named_modules())
    x = m["bn"](m["stem"](x)).clamp(min=0)
    for stage in range(3):
        for block in range(2):
            at = f"stages.{stage}.{block}."
            y = m[at + "bn2"](m[at + "conv2"](m[at + "bn1"](m[at + "conv1"](x)).clamp(min=0)))
            if stage > 0 and block == 0:
                x = F.avg_pool2d(x, 1, 2)
                x = torch.cat([x, torch.zeros_like(x)], dim=1)
            x = (x + y).clamp(min=0)
    return m["classifier"](x.mean((2, 3)))


@pytest.mark.parametrize(
    ("model", "by_hand"),
    [(models.resnet20(), _preact_by_hand), (models.OptionAResNet(2), _option_a_by_hand)],
    ids=["preact", "option_a"],
)
def test_forward_is_the_described_network(model: nn.Module, by_hand) -> None:
    _randomise_norms_(model)
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        assert torch.allclose(model(x), by_hand(model, x), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_imagenet_resnets_take_torchvision_weights(name: str) -> None:
    torchvision = pytest.importorskip("torchvision", reason='the "vision" extra is not installed')
    theirs = _randomise_norms_(getattr(torchvision.models, name)(num_classes=11))
    ours = models.build(name, 11).double().eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    with torch.no_grad():
        assert torch.allclose(ours(x), theirs(x), rtol=1e-10, atol=1e-10)
