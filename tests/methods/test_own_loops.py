"""Loops with more around a step: accumulation, GradScaler, closures, averages, clipped gradients, validation."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from method_networks import Chain, batch, sgd, train
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from softprune.cut import remap_optimizer
from softprune.errors import ModelError
from softprune.masks import is_masked
from softprune.methods import REGISTRY, Pruner, SoftPruner


def made(**options: Any) -> SoftPruner:
    torch.manual_seed(0)
    pruner = SoftPruner(Chain(), batch()[0], **options)
    with torch.no_grad():
        for norm in pruner.norms.values():  # some channels are dead, and some are drawn either way
            norm.bias.copy_(torch.linspace(-3, 1, norm.num_features))
    pruner.model.train()
    return pruner


@pytest.mark.parametrize("method", ["sss", "variational"])
def test_gradients_that_the_loop_resets_are_forgotten(method: str) -> None:
    pruner = REGISTRY[method](Chain(), batch()[0])
    optimizer = sgd(pruner)
    train(pruner, optimizer, 1)
    optimizer.zero_grad()
    for step, factor in ((1, math.nan), (2, 1.0)):
        loss = pruner.loss(factor * F.cross_entropy(pruner.model(batch(step)[0]), batch(step)[1]))
        loss.backward()
        if loss.isfinite():
            optimizer.step()
        optimizer.zero_grad()
    assert all(bool(tensor.isfinite().all()) for tensor in pruner.detach().state_dict().values())


def test_validation_between_forward_and_step_changes_nothing() -> None:
    weights = []
    for validates in (False, True):
        pruner = made(target={"macs": 0.5}, total_steps=6)
        optimizer = sgd(pruner)
        for step in range(6):
            loss = pruner.loss(F.cross_entropy(pruner.model(batch(step)[0]), batch(step)[1]))
            if validates and step % 2:
                pruner.model.eval()
                with torch.no_grad():
                    pruner.model(batch(99)[0])
                pruner.model.train()
            loss.backward()
            nn.utils.clip_grad_norm_(pruner.model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        weights.append(copy.deepcopy(pruner.model.state_dict()))
    for one, other in zip(*(state.values() for state in weights), strict=True):
        assert torch.equal(one, other)


def ema_of_torch(model: nn.Module, use_buffers: bool) -> Any:
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7), use_buffers=use_buffers)
    return average, average.update_parameters


def ema_of_timm(model: nn.Module) -> Any:
    utils = pytest.importorskip("timm.utils", reason='the "timm" extra is not installed')
    average = utils.ModelEmaV3(model, decay=0.7)
    return average, average.update


@pytest.mark.parametrize(
    ("ema", "target"),
    [
        (lambda model: ema_of_torch(model, False), None),
        (lambda model: ema_of_torch(model, True), {"macs": 0.5}),
        (ema_of_timm, None),
    ],
    ids=["torch", "torch-buffers", "timm"],
)
def test_an_average_is_evaluated_as_it_is_cut(ema: Any, target: dict[str, float] | None) -> None:
    pruner = made(target=target, total_steps=8) if target else made(strength=1e-2)
    optimizer = sgd(pruner)
    average, update = ema(pruner.model)
    for step in range(8):
        train(pruner, optimizer, 1, step)
        update(pruner.model)
        average.eval()
        average(batch(99)[0])
    compact = pruner.compact(average).eval()
    assert compact[0].out_channels + compact[3].out_channels < 20
    with torch.no_grad():
        torch.testing.assert_close(compact(batch(98)[0]), average(batch(98)[0]))


@pytest.mark.parametrize(
    ("method", "settings"), [("slimming", {"ratio": 0.5}), ("fpgm", {}), ("sss", {"strength": 2.0})]
)
def test_a_copy_follows_the_decisions_of_every_method(method: str, settings: dict[str, Any]) -> None:
    """Momentum encoders, and target networks that load the weights now and then, are copies, too."""
    torch.manual_seed(0)
    pruner = REGISTRY[method](Chain(), batch()[0], **settings)
    average, update = ema_of_torch(pruner.model, True)
    target = copy.deepcopy(pruner.model).eval()
    optimizer = sgd(pruner)
    for step in range(4):
        train(pruner, optimizer, 1, step)
        pruner.end_epoch(step)
        update(pruner.model)
    pruner.decide()
    assert not all(mask.all() for mask in pruner.masks().values())
    target.load_state_dict(pruner.model.state_dict())
    compact, images = pruner.compact(average).eval(), batch(98)[0]
    with torch.no_grad():
        torch.testing.assert_close(compact(images), average.eval()(images))
        assert torch.equal(target(images), pruner.model.eval()(images))


@pytest.mark.parametrize("method", ["scp", "sfp", "sss"])
def test_a_copy_on_another_device_shares_the_decisions(method: str) -> None:
    """An EMA on the CPU of a network on a GPU, to save the GPU's memory."""
    settings: dict[str, Any] = {"target": {"macs": 0.5}, "total_steps": 4} if method == "scp" else {}
    pruner = REGISTRY[method](Chain(), batch()[0], **settings)
    moved = copy.deepcopy(pruner.model).to("meta").eval()
    train(pruner, sgd(pruner), 4)
    pruner.decide()
    theirs = next(module for module in moved.modules() if is_masked(module)).masks
    for name in theirs.shared:
        assert getattr(theirs, name) is getattr(pruner.site_masks, name)
    assert moved(batch()[0].to("meta")).is_meta


def test_the_compact_network_is_pruned_again_with_the_same_optimizer() -> None:
    pruner = made(strength=1.0)
    optimizer = sgd(pruner)
    train(pruner, optimizer, 2)
    compact = pruner.compact().train()
    remap_optimizer(optimizer, pruner.model, compact)
    first, reference = int(pruner.clock.step), weakref.ref(pruner)
    again = SoftPruner(compact, batch()[0])
    again.attach(optimizer)
    train(again, optimizer, 3)
    assert (first, int(again.clock.step)) == (int(pruner.clock.step), 3)
    del pruner
    gc.collect()
    assert reference() is None


def test_transforms_of_torch_func_evaluate_and_do_not_train() -> None:
    pruner = made(min_channels=2)
    other = copy.deepcopy(pruner.model)
    with torch.no_grad():
        other[1].bias.neg_()
    images = batch()[0]
    with pytest.raises(ModelError, match=r"torch\.func"):
        torch.func.jvp(pruner.model, (images,), (images,))
    train(pruner, sgd(pruner), 1)
    networks = [each.eval() for each in (pruner.model, other)]
    weights, buffers = torch.func.stack_module_state(networks)
    together = torch.func.vmap(lambda *state: torch.func.functional_call(other, state, images))(weights, buffers)
    for output, network in zip(together, networks, strict=True):
        torch.testing.assert_close(output, network(images))
    assert pruner.compact()[0].out_channels < 8


def test_update_bn_averages_all_batches_in_every_channel() -> None:
    """Whichever channels were drawn: those of the first BatchNorm have the inputs of the network without masks."""
    pruner = made()
    plain = Chain()
    plain.load_state_dict(pruner.model.state_dict())
    for model in (pruner.model, plain):
        update_bn([batch(step)[0] for step in range(6)], model)
    torch.testing.assert_close(pruner.model[1].running_mean, plain[1].running_mean)
    torch.testing.assert_close(pruner.model[1].running_var, plain[1].running_var)


# --- noise, accumulated gradients, skipped steps ----------------------------------------------------------------------


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


# --- closures ---------------------------------------------------------------------------------------------------------


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
