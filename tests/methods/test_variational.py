"""Variational Pruning: the drawn scale, its divergence, evaluation at the mean, and channels that never return."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from method_networks import Chain, batch, sgd, train
from torch import nn

from softprune.methods import VariationalPruner
from softprune.methods.learned import normal_noise
from softprune.rng import Clock, channel_words


def test_the_noise_is_standard_normal_and_repeats() -> None:
    clock = Clock(3)
    words = channel_words(3, 0, 200_000)
    noise = normal_noise(clock, words)
    assert abs(float(noise.mean())) < 0.01
    assert abs(float(noise.std()) - 1) < 0.01
    assert abs(float((noise.abs() < 1).float().mean()) - 0.6827) < 0.005
    assert noise.equal(normal_noise(clock, words))
    clock.end_step()
    assert not noise.equal(normal_noise(clock, words))


def test_evaluation_gates_the_shift_by_the_mean_scale() -> None:
    torch.manual_seed(0)
    images, _ = batch()
    model, plain = Chain(8), Chain(8)
    for norm in (model[1], plain[1]):
        assert isinstance(norm, nn.BatchNorm2d)
        with torch.no_grad():
            norm.weight.copy_(torch.linspace(-1, 1, 8))
            norm.bias.fill_(0.5)
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        plain[1].bias.mul_(plain[1].weight)  # y = mu * (x_hat + beta)
    VariationalPruner(model, images)
    torch.testing.assert_close(model.eval()(images), plain.eval()(images))


def test_the_divergence_and_its_gradients() -> None:
    torch.manual_seed(0)
    images, labels = batch()
    pruner = VariationalPruner(Chain(8), images, strength=0.1, sigma=0.5)
    task = F.cross_entropy(pruner.model(images), labels).detach()
    extra = pruner.loss(task) - task
    torch.testing.assert_close(extra, torch.tensor(0.1 * 8 * 1.0 / (2 * 0.25)))
    norm, log_sigma = pruner.model.get_submodule("1"), pruner.site_masks.value
    of_mu, of_sigma = torch.autograd.grad(extra, [norm.weight, log_sigma])  # type: ignore[list-item]
    torch.testing.assert_close(of_mu, torch.full((8,), 0.1 * 1.0 / 0.25))
    torch.testing.assert_close(of_sigma, torch.full((8,), -0.1 * 1.0 / 0.25))  # it falls as sigma grows


@pytest.mark.parametrize(
    ("optimizer", "momentum"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.7), 0.7),
        (lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.999)), 0.8),
        (lambda p: torch.optim.Adagrad(p, lr=0.1), 0.0),
    ],
)
def test_a_step_has_the_momentum_of_sgd_or_adams_first_beta(optimizer: Any, momentum: float) -> None:
    pruner = VariationalPruner(Chain(8), batch()[0])
    pruner.attach(optimizer(pruner.model.parameters()))
    value = pruner.site_masks.value
    before = value.detach().clone()
    for _ in range(2):
        value.grad = torch.ones_like(value)
        pruner.before_step()
    torch.testing.assert_close(value.detach(), before - 0.1 * (1 + 1 + momentum))


def test_a_dropped_channel_has_no_divergence_and_does_not_return_to_fill_a_floor() -> None:
    pruner = VariationalPruner(Chain(8), batch()[0], strength=0.1, sigma=0.005, min_channels=3)
    whole = pruner._extra_loss()
    keep = torch.arange(8) >= 4
    pruner.site_masks.keep.copy_(keep)
    torch.testing.assert_close(pruner._extra_loss(), whole / 2)
    with torch.no_grad():
        pruner.norms["1"].weight.copy_(torch.tensor([0.9, 0.9, 0.9, 0.9, 0.015, 0.01, 0.005, 0.0]))
    pruner.end_epoch(0)
    assert pruner.masks()["1"].tolist() == [False] * 4 + [True] * 3 + [False]


def test_settled_channels_go_for_good() -> None:
    torch.manual_seed(0)
    pruner = VariationalPruner(Chain(8), batch()[0], sigma=0.05)
    norm, log_sigma = pruner.model.get_submodule("1"), pruner.site_masks.value
    with torch.no_grad():
        norm.weight[:4] = 0.01  # type: ignore[index,operator]
        log_sigma[2:6] = -6.0  # sigma 0.0025
    pruner.end_epoch(0)
    assert (~pruner.masks()["1"]).nonzero().flatten().tolist() == [2, 3]
    with torch.no_grad():
        norm.weight[2:4] = 1.0  # type: ignore[index,operator]
    pruner.end_epoch(1)
    assert (~pruner.masks()["1"]).nonzero().flatten().tolist() == [2, 3]
    train(pruner, sgd(pruner))
    images, _ = batch(1)
    torch.testing.assert_close(pruner.compact().eval()(images), pruner.model.eval()(images))
    with torch.no_grad():
        norm.weight.zero_()  # type: ignore[operator]
        log_sigma.fill_(-6.0)
    pruner.end_epoch(2)
    assert int(pruner.masks()["1"].sum()) == 1  # every path passes here
