"""What weight decay acts on."""

from torch import nn

from softprune.methods.pruner import undecayed_biases


def test_shifts_and_biases_are_spared_from_weight_decay():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
    decayed, spared = undecayed_biases(model, 2e-4)
    assert (decayed["weight_decay"], spared["weight_decay"]) == (2e-4, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert [names[id(p)] for p in decayed["params"]] == ["0.weight", "1.weight", "3.weight"]
    assert [names[id(p)] for p in spared["params"]] == ["0.bias", "1.bias", "3.bias"]


def test_frozen_parameters_and_empty_groups_are_left_out():
    model = nn.Linear(2, 2, bias=False)
    assert len(undecayed_biases(model, 0.1)) == 1
    assert undecayed_biases(model.requires_grad_(False), 0.1) == []
