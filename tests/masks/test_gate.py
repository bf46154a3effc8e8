"""Gates and rounding."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from softprune.errors import ConfigError, ModelError
from softprune.masks import (
    Clock,
    FixedGate,
    MaskBank,
    MaskConfig,
    MaskDecision,
    SoftGate,
    dead_probability,
    fill_to_multiple,
    hard_mask,
    logistic_noise,
    mask_,
    relaxed_sample,
    sparsity_loss,
    sparsity_terms,
)
from softprune.rng import channel_words

CONFIG = MaskConfig()


def random_bn(width=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    bn = nn.BatchNorm1d(width)
    with torch.no_grad():
        bn.weight.copy_(torch.randn(width, generator=generator))
        bn.bias.copy_(torch.randn(width, generator=generator) - 1)
    return bn


def test_soft_gate_is_the_papers_functions():
    bn, clock = random_bn(), Clock(5)
    gate = SoftGate(CONFIG, clock, 7, activation="silu")
    clock.begin_forward()
    dead = dead_probability(bn.bias, bn.weight, CONFIG, "silu")
    noise = logistic_noise(clock, channel_words(5, 7, 32))
    assert torch.equal(gate.sample(bn), relaxed_sample(dead, noise, CONFIG))
    assert torch.equal(gate.hard(bn), hard_mask(dead, CONFIG))
    bank = MaskBank([mask_(bn, gate)])
    assert torch.equal(bank.loss(), sparsity_loss(bn.bias, bn.weight, CONFIG, "silu"))
    assert gate.sample(bn).requires_grad
    assert not gate.hard(bn).requires_grad


def test_samples_repeat_within_a_forward_and_change_with_it():
    bn, clock = random_bn(), Clock()
    gate = SoftGate(CONFIG, clock, 0)
    first = gate.sample(bn)
    assert torch.equal(first, gate.sample(bn))
    clock.begin_forward()
    assert not torch.equal(first, gate.sample(bn))


def test_a_decision_in_force_forces_channels_off_and_keeps_no_dead_one():
    bn = random_bn(4)
    with torch.no_grad():
        bn.bias.copy_(torch.tensor([1.0, 1.0, -9.0, -9.0]))
        bn.weight.fill_(0.5)
    gate = SoftGate(CONFIG, Clock(), 0)
    gate.allowed = torch.tensor([True, False, True, False])
    gate.decision = MaskDecision()
    gate.to(torch.device("cpu"))
    assert gate.hard(bn).tolist() == [True, True, False, False]
    soft = gate.sample(bn)
    gate.decision.in_force.fill_(True)
    assert gate.hard(bn).tolist() == [True, False, False, False]
    assert torch.equal(gate.sample(bn), torch.where(gate.allowed, soft, 0.0))
    gate.min_channels = 2
    assert gate.hard(bn).tolist() == [True, False, True, False], "a floor takes what is allowed"


def test_a_weight_scales_each_channels_sparsity_loss():
    bn = random_bn(4)
    gate = SoftGate(CONFIG, Clock(), 0)
    gate.weight = torch.tensor([1.0, 0.0, -1.0, 2.0])
    terms = sparsity_terms(bn.bias, bn.weight, CONFIG)
    torch.testing.assert_close(MaskBank([mask_(bn, gate)]).loss(), (terms * gate.weight).sum())


def test_rounded_gates_keep_the_likeliest():
    bn = random_bn()
    plain = SoftGate(CONFIG, Clock(), 0).hard(bn)
    rounded = SoftGate(CONFIG, Clock(), 0, round_to=8).hard(bn)
    assert 0 < plain.sum() < 32
    assert plain.sum() % 8 != 0
    assert rounded.sum() == -(-int(plain.sum()) // 8) * 8
    dead = dead_probability(bn.bias, bn.weight, CONFIG)
    assert dead[rounded].max() <= dead[~rounded].min()


def test_a_floor_holds_in_a_dead_layer():
    bn = random_bn()
    with torch.no_grad():
        bn.bias.copy_(-10 - torch.arange(32.0))
        bn.weight.fill_(1.0)
    assert SoftGate(CONFIG, Clock(), 0).hard(bn).sum() == 0
    assert SoftGate(CONFIG, Clock(), 0, round_to=8).hard(bn).sum() == 0
    assert SoftGate(CONFIG, Clock(), 0, min_channels=3).hard(bn).nonzero().flatten().tolist() == [0, 1, 2]
    assert SoftGate(CONFIG, Clock(), 0, round_to=8, min_channels=3).hard(bn).sum() == 8


@settings(max_examples=200, deadline=None)
@given(
    alive=st.lists(st.floats(0, 1, width=32), min_size=1, max_size=20),
    threshold=st.floats(0, 1),
    round_to=st.integers(1, 9),
    min_channels=st.integers(0, 25),
)
def test_round_up_laws(alive, threshold, round_to, min_channels):
    alive = torch.tensor(alive)
    keep = alive >= threshold
    rounded = fill_to_multiple(keep, alive, round_to, min_channels)
    count, width = int(rounded.sum()), alive.numel()
    assert (rounded | ~keep).all()
    assert count % round_to == 0 or count == width
    assert count >= min(min_channels, width)
    assert count < max(int(keep.sum()), min_channels) + round_to
    if rounded.any() and not rounded.all():
        assert alive[rounded].min() >= alive[~rounded].max()


def test_round_up_keeps_what_another_rule_kept():
    keep = torch.tensor([False, True, False, False])
    rounded = fill_to_multiple(keep, torch.tensor([0.1, 0.0, 0.3, 0.3]), 2)
    assert rounded.tolist() == [False, True, True, False]


def test_fixed_gate():
    bn = random_bn(3).double()
    mask = torch.tensor([True, False, True])
    assert FixedGate(mask).sample(bn) is None
    sample = FixedGate(mask, masked_training=True).sample(bn)
    assert sample.dtype == torch.float64
    assert sample.tolist() == [1, 0, 1]
    assert FixedGate(mask).hard(bn) is mask
    assert FixedGate(mask).gate_statistics == "none"


@pytest.mark.parametrize("mask", [torch.ones(3), torch.ones(2, 2, dtype=torch.bool)])
def test_a_fixed_mask_is_a_row_of_booleans(mask):
    with pytest.raises(ModelError, match="one-dimensional tensor of booleans"):
        FixedGate(mask)


@pytest.mark.parametrize("arguments", [{"round_to": 0}, {"round_to": 2.0}, {"min_channels": -1}])
def test_impossible_rounding_is_refused(arguments):
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        SoftGate(CONFIG, Clock(), 0, **arguments)


def test_an_unknown_activation_is_refused_at_once():
    with pytest.raises(ConfigError, match="'sigmoid'"):
        SoftGate(CONFIG, Clock(), 0, activation="sigmoid")


def test_copied_gates_share_their_copied_clock():
    clock = Clock()
    gates = [SoftGate(CONFIG, clock, i) for i in range(2)]
    first, second = copy.deepcopy(gates)
    assert first.clock is second.clock
    assert first.clock is not clock
