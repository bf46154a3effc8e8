"""Proofs that must not be fooled: infinite outputs, outputs of different scale, one batch size, one dtype."""

import copy
import math
import threading
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from topologies import randomise_
from torch import Tensor, nn
from torch.nn.utils import prune

import softprune as sp
from softprune.cut.comparison import compare
from softprune.cut.verify import verify
from softprune.errors import ModelError, VerificationError


class Plain(nn.Module):
    """conv-BN-ReLU twice, mean, linear; `end` is what a test adds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 4)

    def begin(self, x: Tensor) -> Tensor:
        return x

    def end(self, x: Tensor) -> object:
        return x

    def forward(self, x: Tensor) -> object:
        x = F.relu(self.bn1(self.conv1(self.begin(x))))
        return self.end(self.fc(F.relu(self.bn2(self.conv2(x))).mean((2, 3))))


def half_dead(network: nn.Module, example: Tensor) -> sp.SoftPruner:
    randomise_(network)
    pruner = sp.SoftPruner(network, example)
    with torch.no_grad():
        for site in pruner.sites:
            network.get_submodule(site.name).bias[::2] = -9.0
    return pruner


def test_infinite_outputs_hide_no_difference() -> None:
    class Masked(Plain):
        def end(self, x: Tensor) -> Tensor:
            return x.masked_fill(torch.tensor([False, True, False, False]), -math.inf)

    network = Masked()
    compact = half_dead(network, torch.randn(2, 3, 8, 8)).compact()
    assert compact.conv1.out_channels == 4
    spoiled = copy.deepcopy(compact)
    with torch.no_grad():
        spoiled.fc.weight += 7
    with pytest.raises(VerificationError, match="must equal the masked one"):
        verify(compact, spoiled, torch.randn(2, 3, 8, 8))
    assert math.isfinite(verify(compact, copy.deepcopy(compact), torch.randn(2, 3, 8, 8)).scale)


@pytest.mark.parametrize("factor", [1.0, 1e4, 1e9])
def test_every_output_is_measured_by_its_own_scale(factor: float) -> None:
    large = factor * torch.ones(3)
    difference, scale = compare([torch.ones(3), large], [torch.ones(3) + 0.1, large])
    assert difference > 1e-6 * scale


@pytest.mark.parametrize(
    "begin",
    [
        pytest.param(lambda self, x: x.reshape(4, 3, 8, 8), id="a literal in a view"),
        pytest.param(lambda self, x: x + torch.zeros(4, 1, 1, 1).to(x), id="a constant of that size"),
    ],
)
def test_a_network_of_one_batch_size_is_proved_at_that_size(begin) -> None:
    network = type("Fixed", (Plain,), {"begin": begin})()
    pruner = half_dead(network, torch.randn(4, 3, 8, 8))
    assert pruner.compact().conv1.out_channels == 4
    assert pruner.certificate.inputs[0] == "4x3x8x8"


def test_a_network_that_cannot_be_copied_is_said() -> None:
    network = Plain()
    network.lock = threading.Lock()
    with pytest.raises(ModelError, match=r"copy\.deepcopy must take it"):
        verify(network, Plain(), torch.randn(2, 3, 8, 8))


def _with_feature(network: Plain) -> None:
    network.conv1.register_forward_hook(lambda module, _, output: setattr(module, "features", {"last": [output]}))


def _with_old_weight_norm(network: Plain) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.nn.utils.weight_norm(network.conv1)


def _with_pruned_weights(network: Plain) -> None:
    prune.l1_unstructured(network.conv1, "weight", 0.5)


@pytest.mark.parametrize("leave", [_with_feature, _with_old_weight_norm, _with_pruned_weights])
def test_what_forward_left_on_a_module_is_copied_without_its_graph(leave: Callable[[Plain], None]) -> None:
    network, images = Plain(), torch.randn(2, 3, 8, 8)
    leave(network)
    network(images)
    pruner = half_dead(network, images)
    network.train()(images)
    compact = pruner.compact()
    assert torch.allclose(compact.eval()(images), network.eval()(images), atol=1e-6)
