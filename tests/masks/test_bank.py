"""All masks at once: the same numbers as gate by gate, in every way of running."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from softprune.errors import ModelError
from softprune.masks import (
    Clock,
    FixedGate,
    MaskBank,
    MaskConfig,
    MaskDecision,
    SoftGate,
    draw_chain,
    mask_,
    sparsity_loss,
    sparsity_terms,
)
from softprune.masks.sampling import hook_root_

ACTIVATIONS = {"relu": nn.ReLU, "silu": nn.SiLU, "leaky_relu": nn.LeakyReLU}


LAYERS = [(5, "relu"), (8, "silu"), (7, "relu"), (6, "leaky_relu"), (4, "relu")]
FEW_LAYERS = [(5, "relu"), (6, "leaky_relu"), (4, "relu")]
"""For the compiler, which takes seconds for each layer."""


def make_model(seed=0, dtype=torch.float64, widths=LAYERS):
    """Sites of different widths and activations; the gate of the last one is fixed."""
    torch.manual_seed(seed)
    layers, width = [], 3
    for next_width, activation in widths:
        bn = nn.BatchNorm2d(next_width)
        nn.init.uniform_(bn.weight, -0.3, 0.7)
        nn.init.uniform_(bn.bias, -1.0, 0.5)
        layers += [nn.Conv2d(width, next_width, 3, padding=1), bn, ACTIVATIONS[activation]()]
        width = next_width
    model = nn.Sequential(*layers).to(dtype)
    clock = Clock(11)
    sites = [m for m in model if isinstance(m, nn.BatchNorm2d)]
    for i, (bn, (_, activation)) in enumerate(zip(sites[:-1], widths[:-1], strict=True)):
        mask_(bn, SoftGate(MaskConfig(), clock, i, activation=activation))
    mask_(sites[-1], FixedGate(torch.tensor([True, False, True, True]), masked_training=True))
    return model, clock, sites


def hook(model, clock, bank=None):
    """What a pruner does around the root forward."""

    def before(module, args):
        if module.training:
            clock.begin_forward()
            if bank is not None:
                bank.begin_forward()

    def after(module, args, output):
        if module.training and bank is not None:
            bank.end_forward()

    model.register_forward_pre_hook(before)
    model.register_forward_hook(after, always_call=True)


def train(call, model, clock, loss, steps=3, forwards=1):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        for _ in range(forwards):
            x = torch.randn(4, 3, 5, 5, generator=generator, dtype=torch.float64)
            (call(x).square().mean() + 1e-3 * loss()).backward()
        optimizer.step()
        clock.end_step()
        optimizer.zero_grad()
    return model.state_dict()


def site_losses(sites):
    return lambda: sum(sparsity_loss(bn.bias, bn.weight, bn.gate.config, bn.gate.activation) for bn in sites[:-1])


def assert_same(first, second):
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("forwards", [1, 2])
def test_training_is_the_same_with_and_without_the_bank(forwards):
    model, clock, sites = make_model()
    hook(model, clock)
    expected = train(model, model, clock, site_losses(sites), forwards=forwards)

    model, clock, sites = make_model()
    bank = MaskBank(sites)
    hook(model, clock, bank)
    assert_same(expected, train(model, model, clock, bank.loss, forwards=forwards))
    assert all(bn.folded is None for bn in sites)


def test_compiled_training_with_the_bank_is_the_same():
    model, clock, sites = make_model(widths=FEW_LAYERS)
    hook(model, clock)
    expected = train(model, model, clock, site_losses(sites), forwards=2)

    model, clock, sites = make_model(widths=FEW_LAYERS)
    bank = MaskBank(sites)
    hook(model, clock, bank)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same(expected, train(compiled, model, clock, bank.loss, forwards=2))


def test_inductor_trains_the_same():
    """One site through the default backend, whose kernels and partition are its own."""
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model, clock = nn.Sequential(nn.BatchNorm1d(6), nn.ReLU()), Clock(4)
        nn.init.uniform_(model[0].weight, 0.1, 0.5)
        nn.init.uniform_(model[0].bias, -0.9, 0.0)
        mask_(model[0], SoftGate(MaskConfig(), clock, 0))
        hook(model, clock)
        call = torch.compile(model, fullgraph=True) if compiled else model
        for step in range(2):
            x = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
            call(x).square().sum().backward()
            clock.end_step()
        results.append({**model.state_dict(), "gradient": model[0].bias.grad})
        assert results[-1]["gradient"].abs().max() > 1e-3
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-4, atol=1e-5)


def test_compiled_blocks_inside_an_eager_model_are_the_same():
    model, clock, sites = make_model()
    hook(model, clock)
    expected = train(model, model, clock, site_losses(sites))

    model, clock, sites = make_model()
    bank = MaskBank(sites)
    hook(model, clock, bank)
    model[1].compile(fullgraph=True, backend="aot_eager")
    assert_same(expected, train(model, model, clock, bank.loss))


def test_the_bank_draws_what_the_gates_draw():
    _, clock, sites = make_model(dtype=torch.float32)
    clock.begin_forward()
    expected = [bn.gate.sample(bn) for bn in sites]
    MaskBank(sites).begin_forward()
    for bn, n in zip(sites[:-1], expected, strict=False):
        torch.testing.assert_close(bn.folded.n, n, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(bn.folded.weight, n * bn.weight, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(bn.folded.bias, n * bn.bias, rtol=1e-6, atol=1e-7)
        assert torch.equal(bn.folded.on, n > 0.5)
    assert sites[-1].folded is None


def _give_constants(bn):
    bn.gate = SoftGate(MaskConfig(k=5.0, s=1.0), bn.gate.clock, bn.gate.site, activation="none")


def _give_clock(bn):
    bn.gate.clock = Clock(11)
    bn.gate.clock.begin_forward()


def _give_decision(bn):
    bn.gate.allowed, bn.gate.decision = torch.arange(5) < 3, MaskDecision()
    bn.gate.decision.in_force.fill_(True)


def _give_weight(bn):
    bn.gate.weight = torch.arange(5.0)


def _give_slope(bn):
    bn.slopes = ((nn.PReLU(init=4.0), "weight"),)


CHANGES = [_give_constants, _give_clock, _give_decision, _give_weight, _give_slope, nn.Module.double]


@pytest.mark.parametrize("change_", CHANGES)
def test_sites_that_differ_in_one_thing_are_drawn_apart(change_):
    """The same numbers as gate by gate, whatever one of two sites has and the other has not."""
    torch.manual_seed(0)
    clock, sites = Clock(11), [nn.BatchNorm1d(5), nn.BatchNorm1d(5)]
    for number, bn in enumerate(sites):
        nn.init.uniform_(bn.weight, 0.02, 0.03)  # about half of the samples are on
        nn.init.zeros_(bn.bias)
        mask_(bn, SoftGate(MaskConfig(), clock, number, activation="none"))
    change_(sites[1])
    bank = MaskBank(sites)
    bank.begin_forward()
    expected = 0.0
    for bn in sites:
        torch.testing.assert_close(bn.folded.n, bn.gate.sample(bn))
        weight = 1.0 if bn.gate.weight is None else bn.gate.weight
        expected += (weight * sparsity_terms(bn.bias, bn.weight, bn.gate.config, bn.gate.activation)).sum()
    torch.testing.assert_close(bank.loss(), expected, check_dtype=False)


def test_loss_is_the_sum_of_the_gates_losses():
    _, _, sites = make_model()
    total, expected = MaskBank(sites).loss(), site_losses(sites)()
    torch.testing.assert_close(total, expected)
    parameters = [p for bn in sites[:-1] for p in (bn.weight, bn.bias)]
    for actual, wanted in zip(
        torch.autograd.grad(total, parameters), torch.autograd.grad(expected, parameters), strict=True
    ):
        assert torch.equal(actual, wanted)


def test_checkpointed_activations_meet_the_same_samples():
    gradients = []
    for recompute in (False, True):
        model, clock, sites = make_model()
        bank = MaskBank(sites)
        x = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        clock.begin_forward()
        bank.begin_forward()
        output = checkpoint(model, x, use_reentrant=False) if recompute else model(x)
        bank.end_forward()
        assert sites[0].folded is not None
        output.square().sum().backward()
        assert sites[0].folded is None
        gradients.append([p.grad for p in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, plain)


@pytest.mark.parametrize("again", [(6,), (6, 9)])
def test_reentrant_checkpoints_go_backward_on_their_own(again):
    """The first part is checkpointed, or two parts are; each of them frees the graph that it went through."""
    trained = []
    for recompute in (False, True):
        model, clock, sites = make_model()
        bank = MaskBank(sites)

        def call(x, model=model, clock=clock, bank=bank, recompute=recompute):
            clock.begin_forward()
            bank.begin_forward()
            x.requires_grad_()
            for start, end in zip((0, *again), (*again, len(model)), strict=True):
                part = model[start:end]
                x = checkpoint(part, x, use_reentrant=True) if recompute and end in again else part(x)
            bank.end_forward()
            return x

        trained.append(train(call, model, clock, bank.loss))
    # Statistics have moved twice in what was run twice, as without masks.
    plain, recomputed = (
        {name: value for name, value in state.items() if name.endswith(("weight", "bias"))} for state in trained
    )
    assert len(plain) == 20
    assert_same(plain, recomputed)


def test_samples_are_forgotten_without_a_graph():
    model, _, sites = make_model()
    bank = MaskBank(sites)
    bank.begin_forward()
    bank.end_forward()
    assert sites[0].folded is not None  # until a backward, which never comes
    with torch.no_grad():
        bank.begin_forward()
        model(torch.randn(2, 3, 5, 5, dtype=torch.float64))
        bank.end_forward()
    assert sites[0].folded is None


def test_a_copy_made_in_mid_forward_carries_no_sample():
    model, _, sites = make_model()
    bank = MaskBank(sites)
    bank.begin_forward()
    assert sites[0].folded is not None
    assert copy.deepcopy(model)[1].folded is None


def test_the_bank_follows_changes_of_gates_seed_and_dtype():
    model, clock, sites = make_model()
    bank = MaskBank(sites)
    bank.begin_forward()
    first = sites[0].folded.n

    clock.load_state_dict({"seed": 99, "step": 0, "forward": 0})
    bank.begin_forward()
    assert not torch.equal(sites[0].folded.n, first)
    torch.testing.assert_close(sites[0].folded.n, sites[0].gate.sample(sites[0]))

    model.float()
    bank.begin_forward()
    assert sites[0].folded.n.dtype == torch.float32

    bank.clear()
    sites[0].gate = FixedGate(torch.ones(5, dtype=torch.bool))
    bank.begin_forward()
    assert sites[0].folded is None
    assert sites[1].folded is not None


def test_a_frozen_batchnorm_keeps_to_its_hard_mask():
    model, _, sites = make_model()
    sites[0].eval()
    MaskBank(sites).begin_forward()
    features = model[1](model[0](torch.randn(2, 3, 5, 5, dtype=torch.float64)))
    keep = sites[0].gate.hard(sites[0])
    assert torch.equal((features != 0).flatten(2).any(2).any(0), keep)


def test_a_loss_needs_a_site():
    with pytest.raises(ModelError, match="at least one site"):
        MaskBank([]).loss()


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_drawing_ahead_of_a_compiled_forward_is_the_same(backend):
    model, clock, sites = make_model(widths=FEW_LAYERS)
    hook(model, clock)
    expected = train(model, model, clock, site_losses(sites), forwards=2)

    model, clock, sites = make_model(widths=FEW_LAYERS)
    hooks = hook_root_(model, clock, sites)
    chain = draw_chain if backend is None else torch.compile(draw_chain, backend=backend)
    call = model if backend is None else torch.compile(model, fullgraph=True, backend=backend)

    def forward(x):
        hooks.draw_ahead(chain)
        return call(x)

    assert_same(expected, train(forward, model, clock, hooks.bank.loss, forwards=2))
    assert all(bn.folded is None for bn in sites)


def test_a_loss_after_drawing_ahead_reads_the_row_that_was_drawn_from():
    _, _, sites = make_model()
    bank = MaskBank(sites)
    bank.draw_ahead()
    loss = bank.loss()
    assert any(beta.grad_fn in _parents(loss.grad_fn) for beta, _ in bank._gathered)
    copied = copy.deepcopy(bank)
    assert copied._gathered is None
    bank.clear()
    torch.testing.assert_close(bank.loss(), loss)
    torch.nn.init.zeros_(sites[0].bias)
    torch.testing.assert_close(bank.loss(), site_losses(sites)())


def _parents(node):
    found, queue = set(), [node]
    while queue:
        current = queue.pop()
        if current is not None and current not in found:
            found.add(current)
            queue += [parent for parent, _ in current.next_functions]
    return found
