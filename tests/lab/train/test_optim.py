"""SGD with its rate on the device, and the values of schedules."""

import doctest
import math

import pytest
import torch
from torch import nn

from softprune.errors import ConfigError
from softprune.lab.config.settings import FinetuneConfig, RunConfig, TrainConfig
from softprune.lab.train import optim as module
from softprune.lab.train.optim import Schedule, learning_rate, make_sgd, match_gradients
from softprune.methods.pruner import undecayed_biases


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))


@pytest.mark.parametrize("nesterov", [True, False])
def test_sgd_is_pytorchs_own_with_a_number_for_a_rate(nesterov: bool) -> None:
    ours, theirs = network(), network()
    mine = make_sgd(undecayed_biases(ours, 2e-4), lr=0.1, nesterov=nesterov)
    reference = torch.optim.SGD(undecayed_biases(theirs, 2e-4), lr=0.1, momentum=0.9, nesterov=nesterov, foreach=False)
    x = torch.randn(5, 3, 4, 4)
    for step in range(4):
        rate = 0.1 / (step + 1)
        mine.param_groups[0]["lr"].fill_(rate)
        for group in reference.param_groups:
            group["lr"] = rate
        for model, optimizer in ((ours, mine), (theirs, reference)):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_momentum_and_gradients_have_the_memory_order_of_the_weights() -> None:
    model = network().to(memory_format=torch.channels_last)
    optimizer = make_sgd(undecayed_biases(model, 0.0), lr=0.1)
    weight = model[0].weight
    assert optimizer.state[weight]["momentum_buffer"].stride() == weight.stride()
    projection = nn.Conv2d(5, 7, 1, bias=False).weight
    projection.grad = torch.randn(7, 5, 1, 1).as_strided((7, 5, 1, 1), (5, 1, 5, 5))
    expected = projection.grad.clone()
    match_gradients(torch.optim.SGD([projection]))
    assert projection.grad.stride() == projection.stride()
    assert torch.equal(projection.grad, expected)


def test_the_authors_learning_rate() -> None:
    rate = learning_rate(RunConfig(), 782)
    assert [round(rate(epoch * 782), 6) for epoch in range(160)] == [0.1] * 80 + [0.01] * 41 + [0.001] * 39
    assert rate(80 * 782 - 1) == 0.1


def test_cosine_and_warm_up() -> None:
    rate = Schedule(base=2.0, kind="cosine", total_steps=100)
    assert [rate(step) for step in (0, 25, 50, 100, 1000)] == pytest.approx(
        [2.0, 1 + math.cos(math.pi / 4), 1.0, 0.0, 0.0]
    )
    warm = Schedule(base=1.0, kind="cosine", total_steps=14, warmup_steps=4)
    assert [warm(step) for step in (0, 1, 2, 3, 4, 9)] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 0.5])
    assert Schedule(base=1.0, kind="step", milestones=(6,), warmup_steps=4)(6) == pytest.approx(0.1)
    assert Schedule(base=0.3)(10**6) == 0.3
    with pytest.raises(ConfigError, match="warm-up"):
        Schedule(base=1.0, kind="cosine", total_steps=4, warmup_steps=4)


def test_fine_tuning_begins_where_training_ends() -> None:
    tuning = FinetuneConfig(epochs=6, schedule="step", milestones=(2, 4), lr=0.5)
    rate = learning_rate(RunConfig(train=TrainConfig(epochs=10), finetune=tuning), 7, finetune=True)
    assert [rate(step) for step in (70, 83, 84, 98)] == pytest.approx([0.5, 0.5, 0.05, 0.005])


def test_examples_in_the_documentation() -> None:
    assert doctest.testmod(module).failed == 0
