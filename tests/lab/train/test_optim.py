"""SGD with its rate on the device."""

import copy

import pytest
import torch
from torch import nn

from softprune.errors import ConfigError
from softprune.lab.train.optim import make_sgd, match_gradients, share_rate
from softprune.methods.optimizer_hooks import undecayed_biases


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))


@pytest.mark.parametrize("nesterov", [True, False])
def test_same_as_pytorchs_own_with_a_number_for_a_rate(nesterov):
    ours, theirs = _model(), _model()
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


def test_state_survives_saving_and_the_rate_is_shared_again():
    model = _model()
    optimizer = make_sgd(undecayed_biases(model, 0.0), lr=0.1)
    model(torch.randn(5, 3, 4, 4)).sum().backward()
    optimizer.step()
    other = make_sgd(undecayed_biases(model, 0.0), lr=0.7)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    rate = torch.full((1,), 0.25)
    share_rate(other, rate)
    assert all(group["lr"] is rate for group in other.param_groups)
    for parameter in model.parameters():
        assert torch.equal(other.state[parameter]["momentum_buffer"], optimizer.state[parameter]["momentum_buffer"])


def test_momentum_and_gradients_have_the_memory_order_of_the_weights():
    model = _model().to(memory_format=torch.channels_last)
    optimizer = make_sgd(undecayed_biases(model, 0.0), lr=0.1)
    weight = model[0].weight
    assert optimizer.state[weight]["momentum_buffer"].stride() == weight.stride()

    projection = nn.Conv2d(5, 7, 1, bias=False).weight
    projection.grad = torch.randn(7, 5, 1, 1).as_strided((7, 5, 1, 1), (5, 1, 5, 5))
    expected = projection.grad.clone()
    assert projection.grad.stride() != projection.stride()
    match_gradients(torch.optim.SGD([projection]))
    assert projection.grad.stride() == projection.stride()
    assert torch.equal(projection.grad, expected)


def test_no_parameters():
    with pytest.raises(ConfigError, match="one device"):
        make_sgd([{"params": []}], lr=0.1)
