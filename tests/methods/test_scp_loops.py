"""The noise of masks, accumulated gradients, and steps that a GradScaler skips."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from method_networks import Chain, batch
from torch import Tensor

from softprune.methods import SoftPruner


class Loop:
    """A network with channels near the edge, its pruner and optimizer: two of these are the same."""

    def __init__(self, *, fused: bool | None = None) -> None:
        torch.manual_seed(0)
        self.model = Chain().train()
        self.pruner = SoftPruner(self.model, batch()[0], strength=1e-2, seed=7)
        with torch.no_grad():
            for norm in self.pruner.norms.values():
                norm.bias.copy_(torch.linspace(-3, 0, norm.num_features))
        self.optimizer = torch.optim.SGD(self.pruner.parameter_groups(1e-4), lr=0.05, momentum=0.9, fused=fused)
        self.pruner.attach(self.optimizer)

    def objective(self, number: int) -> Tensor:
        images, labels = batch(number)
        return self.pruner.loss(F.cross_entropy(self.model(images), labels))


def test_noise_differs_between_steps_and_forwards_and_repeats_with_the_seed() -> None:
    losses = []
    for loop in (Loop(), Loop()):
        losses.append([loop.objective(0).item() for _ in range(2)])
        loop.optimizer.step()  # no gradient: only the clock moves
        losses[-1] += [loop.objective(0).item() for _ in range(2)]
    assert losses[0] == losses[1]
    assert len({*losses[0]}) == 4


def test_two_forwards_in_a_step_draw_two_masks_and_accumulate() -> None:
    """Two half losses accumulated are the mean of two forwards in one graph."""
    accumulated, joint = Loop(), Loop()
    for piece in (0, 1):
        (accumulated.objective(piece) / 2).backward()
    ((joint.objective(0) + joint.objective(1)) / 2).backward()
    for a, b in zip(accumulated.model.parameters(), joint.model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    accumulated.optimizer.step()
    assert accumulated.pruner.clock.state_dict() == {"seed": 7, "step": 1, "forward": 0}


def test_a_step_that_a_grad_scaler_skips_does_not_count() -> None:
    loop = Loop()
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    for skipped in (True, False):
        scaler.scale(loop.objective(0)).backward()
        if skipped:
            next(loop.model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
        scaler.step(loop.optimizer)
        scaler.update()
        loop.optimizer.zero_grad()
        assert int(loop.pruner.clock.step) == int(not skipped)


def test_a_fused_optimizer_that_is_stepped_but_skips_does_not_count() -> None:
    loop = Loop(fused=True)
    loop.objective(0).backward()
    loop.optimizer.grad_scale = None
    for found_inf in (1.0, 0.0):
        loop.optimizer.found_inf = torch.tensor(found_inf)  # as GradScaler leaves it
        loop.optimizer.step()
        assert int(loop.pruner.clock.step) == int(not found_inf)
