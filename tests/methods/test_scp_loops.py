"""Masked training is the same eager, compiled, accumulated, with skipped steps and after a resume."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from topologies import TOPOLOGIES
from torch import Tensor, nn

import softprune as sp

CHAIN = TOPOLOGIES["chain"]


class Loop:
    """A network, its pruner and optimizer, and data: two of these with the same seed are the same."""

    def __init__(self, *, fused: bool | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = CHAIN.build().train()
        with torch.no_grad():
            for module in self.model.modules():
                if isinstance(module, nn.BatchNorm2d):  # near the edge, so that masks really are drawn
                    module.bias.copy_(torch.linspace(-3, 0, module.num_features))
        self.pruner = sp.SoftPruner(self.model, CHAIN.example(), strength=1e-2, seed=7, **options)
        self.optimizer = torch.optim.SGD(self.pruner.parameter_groups(1e-4), lr=0.05, momentum=0.9, fused=fused)
        self.pruner.attach(self.optimizer)
        generator = torch.Generator().manual_seed(1)
        self.images = torch.randn(6, 8, *CHAIN.shapes[0], generator=generator)
        classes = self.model(CHAIN.example()).shape[1]
        self.labels = torch.randint(classes, (6, 8), generator=generator)
        self.pruner.clock.forward.zero_()

    def objective(self, step: int) -> Tensor:
        return self.pruner.loss(F.cross_entropy(self.model(self.images[step]), self.labels[step]))

    def step(self, step: int) -> None:
        self.objective(step).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> Tensor:
        return torch.cat([tensor.flatten().double() for tensor in self.model.state_dict().values()])


def test_noise_differs_between_steps_and_forwards_and_repeats_with_the_seed() -> None:
    loop, twin = Loop(), Loop()
    losses, twins = [], []
    for step in range(4):
        losses.append(loop.objective(0).item())
        twins.append(twin.objective(0).item())
        if step == 1:
            loop.optimizer.step()  # no gradient: only the clock moves
            twin.optimizer.step()
    assert losses == twins
    assert len(set(losses)) == len(losses)


def test_two_forwards_in_a_step_draw_two_masks_and_accumulate() -> None:
    """Two half losses accumulated are the mean of two forwards in one graph."""
    accumulated, joint = Loop(), Loop()
    for piece in (0, 1):
        (accumulated.objective(piece) / 2).backward()
    ((joint.objective(0) + joint.objective(1)) / 2).backward()
    for a, b in zip(accumulated.model.parameters(), joint.model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    accumulated.optimizer.step()
    joint.optimizer.step()
    assert int(accumulated.pruner.clock.step) == int(joint.pruner.clock.step) == 1
    assert int(accumulated.pruner.clock.forward) == 0


def test_a_step_that_a_grad_scaler_skips_does_not_count() -> None:
    loop = Loop()
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    before = loop.weights()
    scaler.scale(loop.objective(0)).backward()
    next(loop.model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
    scaler.step(loop.optimizer)
    scaler.update()
    loop.optimizer.zero_grad()
    assert int(loop.pruner.clock.step) == 0
    parameters = torch.cat([p.flatten().double() for p in loop.model.parameters()])
    assert torch.isfinite(parameters).all()
    scaler.scale(loop.objective(0)).backward()
    scaler.step(loop.optimizer)
    assert int(loop.pruner.clock.step) == 1
    assert not torch.equal(before, loop.weights())


def test_a_fused_optimizer_that_is_stepped_but_skips_does_not_count() -> None:
    loop = Loop(fused=True)
    loop.objective(0).backward()
    loop.optimizer.grad_scale, loop.optimizer.found_inf = None, torch.ones(())  # as GradScaler leaves them
    loop.optimizer.step()
    assert int(loop.pruner.clock.step) == 0
    loop.optimizer.found_inf = torch.zeros(())
    loop.optimizer.step()
    assert int(loop.pruner.clock.step) == 1
