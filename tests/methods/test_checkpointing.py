"""Activation checkpoints recompute a forward with the masks that it was run with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from softprune.errors import ModelError
from softprune.methods import Pruner, SoftPruner, VariationalPruner

IMAGES = torch.randn(2, 4, 3, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Network(nn.Module):
    """Three blocks, each in a checkpoint where `checkpointed` is set; the last one ends the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3 if i == 0 else 6, 6, 3), nn.BatchNorm2d(6), nn.ReLU()) for i in range(2)
        )
        self.blocks.append(nn.Conv2d(6, 4, 2))
        self.checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        again = self.checkpointed and torch.is_grad_enabled()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if again else block(x)
        return x


Call = Callable[[Tensor], Tensor]


def summed(model: nn.Module, call: Call, first: Tensor, second: Tensor) -> None:
    (call(first) - call(second)).square().sum().backward()


def one_after_another(model: nn.Module, call: Call, first: Tensor, second: Tensor) -> None:
    one, other = call(first), call(second)
    one.square().sum().backward()
    other.square().sum().backward()


def accumulated(model: nn.Module, call: Call, first: Tensor, second: Tensor) -> None:
    for x in (first, second):
        call(x).square().sum().backward()


def others_between(model: nn.Module, call: Call, first: Tensor, second: Tensor) -> None:
    output = call(first)
    with torch.no_grad():
        model(second)
    model.eval()
    model(second)
    model.train()
    output.square().sum().backward()


@pytest.mark.parametrize("order", [summed, one_after_another, accumulated, others_between])
@pytest.mark.parametrize("around", ["blocks", "network", "loss"])
@pytest.mark.parametrize("method", [SoftPruner, VariationalPruner])
def test_gradients_are_those_without_checkpoints(method: type[Pruner], around: str, order: Callable[..., None]) -> None:
    gradients = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = Network().double()
        for block in model.blocks[:2]:
            nn.init.uniform_(block[1].weight, 0.2, 1.0)
            nn.init.uniform_(block[1].bias, -0.3, 0.3)
        pruner = method(model, IMAGES[0], strength=1e-3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pruner.attach(optimizer)
        model.train()
        parts = {"blocks": model, "network": model, "loss": lambda x, model=model: model(x).tanh()}
        model.checkpointed = checkpointed and around == "blocks"

        def call(x: Tensor, part=parts[around], again=checkpointed and around != "blocks") -> Tensor:
            return checkpoint(part, x, use_reentrant=False) if again else part(x)

        for _ in range(2):
            optimizer.zero_grad()
            order(model, call, *IMAGES.clone().requires_grad_())
            optimizer.step()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, plain)


def test_statistics_move_as_without_masks() -> None:
    """BatchNorm's running statistics move in the recomputation as well, masked or not."""
    moved = []
    for masked in (False, True):
        model = Network().double()
        if masked:
            SoftPruner(model, IMAGES[0])
        model.train()
        model.checkpointed = True
        model(IMAGES[0].clone().requires_grad_()).square().sum().backward()
        moved.append([int(block[1].num_batches_tracked) for block in model.blocks[:2]])
    assert moved[0] == moved[1]


@pytest.mark.parametrize("method", [SoftPruner, VariationalPruner])
def test_a_reentrant_checkpoint_is_refused(method: type[Pruner]) -> None:
    model = Network().double().train()
    method(model, IMAGES[0])
    output = checkpoint(model, IMAGES[0].clone().requires_grad_(), use_reentrant=True)
    with pytest.raises(ModelError, match="use_reentrant=False"):
        output.square().sum().backward()
