"""One mask for several BatchNorms: sums are judged as one channel, streams at every point."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from topologies import TOPOLOGIES
from torch import nn

from softprune import SoftPruner
from softprune.masks import Clock, MaskConfig, SoftGate, is_masked, mask_, mask_group_, norms_of, site_affine, unmask_
from softprune.masks.functional import dead_probability, sparsity_loss, sum_of
from softprune.masks.sampling import MaskBank, hook_root_
from softprune.masks.sites import deciding_affine, steepness

CONFIG = MaskConfig()


class Network(nn.Module):
    """Four BatchNorms of one width."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(4))
        for norm in self.norms:
            nn.init.uniform_(norm.weight, 0.1, 0.5)
            nn.init.uniform_(norm.bias, -0.9, 0.1)

    def forward(self, x):
        a, b, c, d = self.norms
        return torch.relu(torch.relu(a(x) + b(x)) + c(x)) + d(x)


POINTS = (("norms.0", "norms.1"), ("norms.2",))


def masked(points=POINTS, activation="relu"):
    model, clock = Network(), Clock(3)
    gate = SoftGate(CONFIG, clock, 5, activation=activation)
    group = [[model.get_submodule(name) for name in point] for point in points]
    first = mask_group_(group, gate)
    return model, clock, gate, first


def test_gaussians_add_up():
    beta, gamma = sum_of([torch.tensor([1.0]), torch.tensor([-3.0])], [torch.tensor([3.0]), torch.tensor([4.0])])
    assert (beta.item(), gamma.item()) == (-2.0, 5.0)
    dead = dead_probability(beta, gamma, CONFIG)
    expected = 0.5 * (1 + math.erf((CONFIG.delta + 2.0) / (5.0 * math.sqrt(2))))
    assert dead.item() == pytest.approx(expected, abs=1e-6)


def test_the_gradient_is_finite_where_all_scales_are_zero():
    beta, gamma = torch.zeros(2, 3, requires_grad=True), torch.zeros(2, 3, requires_grad=True)
    dead_probability(*sum_of(list(beta), list(gamma)), CONFIG).sum().backward()
    assert torch.isfinite(beta.grad).all()
    assert torch.isfinite(gamma.grad).all()


def test_one_batchnorm_is_its_own_site():
    norm = nn.BatchNorm1d(4)
    assert site_affine(norm)[0] is norm.bias
    assert site_affine(norm)[1] is norm.weight


def test_a_stream_is_dead_where_every_point_is_dead():
    model, _, gate, first = masked()
    a, b, c, _ = model.norms
    with torch.no_grad():
        for norm in (a, b, c):
            norm.weight.fill_(0.01)
            norm.bias.fill_(-1.0)
        a.bias[0], b.bias[0] = 2.0, -3.0  # dead as a sum
        a.bias[1] = 2.0  # alive at the first point
        c.bias[2] = 1.0  # alive at the second point
    assert gate.dead(first).tolist() == [True, False, False, True, True, True]
    assert gate.hard(c).tolist() == (~gate.dead(a)).tolist()
    shown, _ = deciding_affine(first)
    assert shown[:3].tolist() == pytest.approx([-1.0, 1.0, 1.0])
    torch.testing.assert_close(gate.alive(first)[1:3], torch.ones(2))
    with torch.no_grad():
        c.weight[3] = -1.0  # reaches further than the first point, though lower
        c.bias[3] = -2.5
    assert deciding_affine(first)[1][3] == -1.0


def test_the_steepest_of_several_learned_slopes_counts():
    norm = mask_(nn.BatchNorm1d(4), SoftGate(CONFIG, Clock(), 0, activation="prelu"))
    assert steepness(norm) is None
    norm.slopes = tuple((nn.PReLU(init=slope), "weight") for slope in (2.0, -4.0, 0.1))
    assert steepness(norm) == 4.0


@pytest.mark.parametrize("activation", ["relu", "silu", "none"])
def test_the_bank_draws_what_the_gates_would_draw(activation):
    model, clock, gate, first = masked(activation=activation)
    hooks = hook_root_(model, clock, [norm for norm in model.modules() if is_masked(norm)])
    clock.begin_forward()
    hooks.bank.begin_forward()
    drawn = [norm.folded.n for norm in model.norms[:3]]
    own = gate.sample(first)
    assert all(torch.equal(n, own) for n in drawn)
    for norm in model.norms[:3]:
        assert torch.equal(norm.folded.weight, own * norm.weight)
    own_loss = sparsity_loss(*site_affine(first), gate.config, gate.activation)
    assert torch.equal(hooks.bank.loss(), own_loss)
    parameters = [p for norm in model.norms[:3] for p in (norm.weight, norm.bias)]
    row = torch.autograd.grad(hooks.bank.loss() + sum(n.sum() for n in drawn), parameters)
    alone = torch.autograd.grad(
        sparsity_loss(*site_affine(first), gate.config, gate.activation) + 3 * gate.sample(first).sum(), parameters
    )
    assert all(torch.allclose(x, y, atol=1e-6) for x, y in zip(row, alone, strict=True))


class Stages(nn.Module):
    """Two streams; the first enters the second between zero channels, one before and two after it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Network(3), Network(6)

    def forward(self, x):
        return self.second(x) + nn.functional.pad(self.first(x[:, :3]), (1, 2))


def masked_stages(clock=None, sites=(0, 1)):
    model, clock = Stages(), clock or Clock(3)
    gates = [SoftGate(CONFIG, clock, number) for number in sites]
    narrow = mask_group_([list(model.first.norms)], gates[0])
    wide = mask_group_([[norm] for norm in model.second.norms], gates[1], ((1, (tuple(model.first.norms),)),))
    return model, clock, gates, narrow, wide


def test_a_channel_is_dead_only_if_what_enters_is_dead():
    model, _, gates, narrow, wide = masked_stages()
    with torch.no_grad():
        for norm in (*model.first.norms, *model.second.norms):
            norm.weight.fill_(0.01)
            norm.bias.fill_(-1.0)
        model.first.norms[2].bias[1] = 9.0
        model.second.norms[0].bias[5] = 9.0
    assert gates[0].dead(narrow).tolist() == [True, False, True]
    assert gates[1].dead(wide).tolist() == [True, True, False, True, True, False]
    plain = copy.deepcopy(model)
    for norm in (*plain.first.norms, *plain.second.norms):
        unmask_(norm)
    points = [[f"second.norms.{number}"] for number in range(4)]
    entering = [(1, [[f"first.norms.{number}" for number in range(4)]])]
    assert torch.equal(gates[1].hard(norms_of(plain, "second.norms.0", points, entering)), gates[1].hard(wide))


def test_the_bank_draws_what_the_gates_would_draw_where_a_stream_enters():
    model, clock, gates, narrow, wide = masked_stages()
    nn.init.constant_(model.first.norms[2].bias, 3.0)  # so that what enters decides
    hooks = hook_root_(model, clock, [norm for norm in model.modules() if is_masked(norm)])
    clock.begin_forward()
    hooks.bank.begin_forward()
    samples = [gate.sample(norm) for gate, norm in zip(gates, (narrow, wide), strict=True)]
    for stream, sample in zip((model.first, model.second), samples, strict=True):
        for norm in stream.norms:
            assert torch.equal(norm.folded.n, sample)
            assert torch.equal(norm.folded.bias, sample * norm.bias)
    # The sparsity loss counts every BatchNorm once, in the site whose mask it has.
    own = [sum_of([n.bias for n in model.first.norms], [n.weight for n in model.first.norms])]
    own += [(norm.bias, norm.weight) for norm in model.second.norms]
    torch.testing.assert_close(hooks.bank.loss(), sum(sparsity_loss(*each, CONFIG) for each in own))
    parameters = list(model.parameters())
    drawn = sum(norm.folded.n.sum() for norm in (narrow, wide))
    for x, y in zip(*(torch.autograd.grad(n, parameters) for n in (drawn, sum(s.sum() for s in samples))), strict=True):
        torch.testing.assert_close(x, y)


def test_the_bank_keeps_streams_apart_that_others_enter():
    clock = Clock(3)
    stages = [masked_stages(clock, sites) for sites in ((0, 1), (2, 3))]
    nn.init.constant_(stages[1][0].first.norms[2].bias, 3.0)
    norms = [norm for model, *_ in stages for norm in model.modules() if is_masked(norm)]
    MaskBank(norms).begin_forward()
    for _, _, gates, _, wide in stages:
        assert torch.equal(wide.folded.n, gates[1].sample(wide))


def test_all_members_are_off_together_in_evaluation():
    model, _, gate, first = masked()
    with torch.no_grad():
        for norm in model.norms[:3]:
            norm.bias[4] = -9.0
    x = torch.randn(16, 6)
    model.eval()
    assert not gate.hard(first)[4]
    assert all((norm(x)[:, 4] == 0).all() for norm in model.norms[:3])


def test_a_copy_has_a_group_of_its_own_and_a_plain_copy_is_judged_alike():
    model, _, gate, first = masked()
    other = copy.deepcopy(model)
    assert other.norms[0].group[1][0] is other.norms[2]
    assert other.norms[0].gate is other.norms[2].gate
    plain = copy.deepcopy(model)
    for norm in plain.norms:
        unmask_(norm)
    with torch.no_grad():
        plain.norms[1].bias.sub_(5)
        model.norms[1].bias.sub_(5)
    assert torch.equal(gate.hard(norms_of(plain, "norms.0", POINTS)), gate.hard(first))
    assert not hasattr(plain.norms[0], "group")


def test_the_learned_slope_of_a_prelu_divides_the_threshold_while_it_is_above_one():
    model = TOPOLOGIES["prelu"].build()
    pruner = SoftPruner(model, TOPOLOGIES["prelu"].example(), seed=1)
    plain = copy.deepcopy(model)
    for name in ("bn1", "bn2"):
        unmask_(plain.get_submodule(name))
    for slope, activation in ((0.25, "prelu"), (-4.0, "leaky_relu*4")):
        copied = copy.deepcopy(model)
        for network in (model, copied, plain):
            with torch.no_grad():
                network.act1.weight[3], network.act2.weight[0] = slope, slope
                for norm in (network.bn1, network.bn2):
                    norm.weight.fill_(0.02)
        for site in pruner.sites:
            norm = model.get_submodule(site.name)
            expected = dead_probability(norm.bias, norm.weight, norm.gate.config, activation)
            of_plain = norms_of(plain, site.name, site.points, site.entering, site.slopes)
            for each in (norm, copied.get_submodule(site.name), of_plain):
                torch.testing.assert_close(norm.gate.dead_probability(each), expected)
            assert norm.gate.dead(norm).all() == (slope == 0.25)
        bank = MaskBank([model.bn1, model.bn2])
        bank.begin_forward()
        for norm in (model.bn1, model.bn2):
            torch.testing.assert_close(norm.folded.n, norm.gate.sample(norm))
        bank.clear()
    with torch.no_grad():
        copied.act1.weight.fill_(0.25)
    assert copied.bn1.gate.dead(copied.bn1).all()
    assert not model.bn1.gate.dead(model.bn1).any()


def test_slopes_are_read_within_one_compiled_graph():
    model, example = TOPOLOGIES["prelu"].build(), TOPOLOGIES["prelu"].example()
    SoftPruner(model, example, seed=1)
    model.train()
    with torch.no_grad():
        model.act1.weight.fill_(4.0)
        other = copy.deepcopy(model)
        torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="eager")(example), other(example))
