"""Optimizers that are stepped with a closure, as Lightning does, and steps that raise."""

import pytest
import torch
import torch.nn.functional as F
from method_networks import Chain, batch, sgd, train
from torch import Tensor

from softprune.methods import REGISTRY, Pruner, SoftPruner


def gradients(pruner: Pruner, step: int = 0) -> Tensor:
    images, labels = batch(step)
    pruner.model.zero_grad()
    loss = pruner.loss(F.cross_entropy(pruner.model(images), labels))
    loss.backward()
    return loss


@pytest.mark.parametrize("method", ["scp", "fpgm", "sss", "variational"])
def test_steps_with_a_closure_are_those_without(method: str) -> None:
    pruners = []
    for _ in range(2):
        torch.manual_seed(0)
        pruners.append(REGISTRY[method](Chain(), batch()[0]))
    train(pruners[0], sgd(pruners[0]), 3)
    optimizer = sgd(pruners[1])
    for step in range(3):
        optimizer.step(lambda step=step: gradients(pruners[1], step))
    for one, other in zip(*(pruner.detach().state_dict().values() for pruner in pruners), strict=True):
        torch.testing.assert_close(one, other)


def test_the_losses_of_a_closure_are_of_one_step() -> None:
    pruner = SoftPruner(Chain(), batch()[0])
    optimizer = torch.optim.LBFGS(pruner.model.parameters(), lr=1e-3, max_iter=4, tolerance_grad=0, tolerance_change=0)
    pruner.attach(optimizer)
    losses = []

    def closure() -> Tensor:
        losses.append(gradients(pruner))
        return losses[-1]

    optimizer.step(closure)
    assert len(losses) > 3
    assert int(pruner.clock.step) == 1
