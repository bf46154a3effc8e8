"""Hooks on the root of a masked model: counting, drawing together, copies, and leaving no trace."""

import copy

import torch
from torch import nn

from softprune.masks import Clock, MaskConfig, SoftGate, draw_chain, is_masked, mask_
from softprune.masks.sampling import HookOwner, hook_root_, unmask_model_


def make_model():
    torch.manual_seed(0)
    model, clock = nn.Sequential(nn.BatchNorm1d(6), nn.ReLU(), nn.BatchNorm1d(6)), Clock(2)
    for i in (0, 2):
        nn.init.uniform_(model[i].weight, 0.1, 0.5)
        nn.init.uniform_(model[i].bias, -0.9, 0.0)
        mask_(model[i], SoftGate(MaskConfig(), clock, i))
    return model, clock, hook_root_(model, clock, [model[0], model[2]])


def test_training_forwards_are_counted_and_others_are_not():
    model, clock, _ = make_model()
    x = torch.randn(8, 6)
    first, second = model(x), model(x)
    assert clock.forward == 2
    assert not torch.equal(first, second)
    model.eval()(x)
    model.train()[0](x)
    assert clock.forward == 2


def test_samples_are_drawn_together_and_given_up_after_backward():
    model, _, _ = make_model()
    output = model(torch.randn(8, 6))
    assert model[0].folded is not None
    output.sum().backward()
    assert model[0].folded is None
    assert model[0].bias.grad is not None


def test_only_the_next_forward_has_samples_drawn_ahead():
    model, clock, hooks = make_model()
    hooks.draw_ahead(draw_chain)
    x = torch.randn(8, 6)
    first, second = model(x), model(x)
    assert clock.forward == 2
    assert not torch.equal(first, second)


def test_a_copy_counts_and_draws_for_itself():
    model, clock, _ = make_model()
    twin = copy.deepcopy(model)
    x = torch.randn(8, 6)
    twin_output = twin(x)
    assert clock.forward == 0
    assert model[0].folded is None
    assert torch.equal(twin_output, model(x))


def test_unmasking_leaves_the_plain_model_and_the_users_hooks():
    model, clock, _ = make_model()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    unmask_model_(model)
    model(torch.randn(8, 6))
    assert not any(is_masked(module) for module in model.modules())
    assert calls == [1]
    assert clock.forward == 0


def test_unmasking_removes_the_hooks_of_every_owner_and_kind():
    class Owner(HookOwner):
        def called(self, *arguments):
            raise AssertionError

    model, _, _ = make_model()
    for register in (
        model.register_forward_pre_hook,
        model.register_forward_hook,
        model.register_full_backward_pre_hook,
        model.register_full_backward_hook,
    ):
        register(Owner().called)
    unmask_model_(model)
    model(torch.randn(8, 6)).sum().backward()
