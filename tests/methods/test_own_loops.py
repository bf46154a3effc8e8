"""Loops with more around a step: SAM, Lookahead, averages of weights, clipped gradients, validation between steps."""

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
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from softprune.cut import remap_optimizer
from softprune.errors import ModelError
from softprune.masks import is_masked
from softprune.methods import REGISTRY, SoftPruner


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
