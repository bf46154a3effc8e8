"""Gates and rounding."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from softprune.errors import ConfigError, ModelError
from softprune.masks import (
    AffineGate,
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
from softprune.masks.gates import check_rounding, keep_common
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
    rounded = fill_to_multiple(keep, torch.tensor([0.1, 0.0, 1.0, 1.0]), 2)
    assert rounded.tolist() == [False, True, True, False]


def test_coupled_batchnorms_keep_channels_in_common():
    """Channel 1 is the likeliest of neither, and dead in none as clearly as 0 and 2 are in one of them."""
    first, second = random_bn(3), random_bn(3)
    with torch.no_grad():
        first.bias.copy_(torch.tensor([-2.0, -3.0, -9.0]))
        second.bias.copy_(torch.tensor([-9.0, -3.0, -2.0]))
        for bn in (first, second):
            bn.weight.fill_(1.0)
    gates = [SoftGate(CONFIG, Clock(), number, min_channels=1) for number in range(2)]
    assert gates[0].hard(first, [(gates[1], second)]).tolist() == [False, True, False]
    assert gates[1].hard(second, [(gates[0], first)]).tolist() == [False, True, False]
    assert keep_common([gate.alive(bn) for gate, bn in zip(gates, (first, second), strict=True)], 2).sum() == 2


def test_an_affine_of_a_methods_own_has_the_dtype_of_its_batchnorm():
    class Doubled(AffineGate):
        def affine(self, bn):
            return 2 * bn.weight.float(), 2 * bn.bias.float()

    bn = random_bn(2).bfloat16()
    weight, bias = Doubled(torch.tensor([True, False])).masked_affine(bn)
    assert torch.equal(weight, torch.stack([2 * bn.weight[0], torch.zeros_like(bn.weight[0])]))
    assert weight.dtype == bias.dtype == torch.bfloat16


def test_fixed_gate():
    bn = random_bn(3).double()
    mask = torch.tensor([True, False, True])
    assert FixedGate(mask).sample(bn) is None
    sample = FixedGate(mask, masked_training=True).sample(bn)
    assert sample.dtype == torch.float64
    assert sample.tolist() == [1, 0, 1]
    assert FixedGate(mask).hard(bn) is mask
    assert FixedGate(mask).gate_statistics == "none"


@pytest.mark.parametrize("arguments", [{"round_to": 0}, {"round_to": 2.0}, {"min_channels": -1}])
def test_impossible_rounding_is_refused(arguments):
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        check_rounding(**{"round_to": 1, "min_channels": 0, **arguments})


def test_an_unknown_activation_is_refused_at_once():
    with pytest.raises(ConfigError, match="'sigmoid'"):
        SoftGate(CONFIG, Clock(), 0, activation="sigmoid")


def test_copied_gates_share_their_copied_clock():
    clock = Clock()
    gates = [SoftGate(CONFIG, clock, i) for i in range(2)]
    first, second = copy.deepcopy(gates)
    assert first.clock is second.clock
    assert first.clock is not clock


def budgeted_gate(width=4):
    gate = SoftGate(CONFIG, Clock(), 0)
    gate.allowed, gate.weight, gate.decision = torch.ones(width, dtype=torch.bool), torch.ones(width), MaskDecision()
    return gate


def test_a_gate_follows_its_batchnorm_with_all_of_its_tensors():
    moved, there = budgeted_gate(), budgeted_gate()
    mask_(random_bn(4), moved).to("meta")
    mask_(random_bn(4).to("meta"), there)
    for gate in (moved, there):
        for tensor in (gate.clock.step, gate.clock.forward, gate.allowed, gate.weight, gate.decision.in_force):
            assert tensor.is_meta


def test_what_a_budget_decides_for_a_model_holds_for_its_copy():
    gate = budgeted_gate()
    twin = copy.deepcopy(gate)
    gate.allowed[0], gate.weight[1] = False, 0.5
    gate.decision.in_force.fill_(True)
    assert twin.allowed.tolist() == [False, True, True, True]
    assert twin.weight.tolist() == [1.0, 0.5, 1.0, 1.0]
    assert twin.decision.in_force


@pytest.mark.parametrize("mask", [torch.ones(3), torch.ones(2, 2, dtype=torch.bool)])
def test_a_fixed_mask_is_a_row_of_booleans(mask):
    with pytest.raises(ModelError, match="one-dimensional tensor of booleans"):
        FixedGate(mask)
