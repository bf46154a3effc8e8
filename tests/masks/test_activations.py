"""Where activations die: the edges against torch's own activations."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import softprune as sp
from softprune.errors import ConfigError
from softprune.graph.operators import activations
from softprune.masks import MaskConfig
from softprune.masks.functional import dead_edges, left_tail_dies

TORCH = {
    "relu": F.relu,
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "silu": F.silu,
    "gelu": F.gelu,
    "mish": F.mish,
    "none": lambda x: x,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "prelu": lambda x: F.prelu(x, torch.tensor([0.7], dtype=x.dtype)),
    "rrelu": F.rrelu,
    "elu": F.elu,
    "celu": F.celu,
    "selu": F.selu,
    "tanh": torch.tanh,
    "hardtanh": F.hardtanh,
    "clamp": lambda x: x.clamp(-2, 3),
    "clamp_min": lambda x: x.clamp_min(-2),
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
    "softshrink": F.softshrink,
    "hardshrink": F.hardshrink,
}
LEFT_TAIL = ("relu", "relu6", "hardswish", "silu", "gelu", "mish")


def dead_set(x, edges):
    """Inputs inside the set that the edges bound."""
    passed = sum((x > edge).to(torch.int64) for edge in edges)
    return passed % 2 == (0 if len(edges) % 2 else 1)


def test_every_known_activation_is_checked_here():
    assert set(TORCH) == {*activations(), "none"}


@pytest.mark.parametrize("delta", [0.05, 0.9])
@pytest.mark.parametrize("name", LEFT_TAIL)
def test_the_set_is_exactly_where_the_output_is_small(name, delta):
    x = torch.linspace(-12, 5, 34001, dtype=torch.float64) + 1e-7
    edges = dead_edges(name, MaskConfig(delta=delta))
    assert torch.equal(dead_set(x, edges), TORCH[name](x).abs() <= delta)


def test_a_dip_shallower_than_delta_does_not_count():
    assert len(dead_edges("silu", MaskConfig(delta=0.27))) == 3
    assert len(dead_edges("silu", MaskConfig(delta=0.28))) == 1


@pytest.mark.parametrize("name", sorted(TORCH.keys() - set(LEFT_TAIL)))
def test_two_sided_activations_stay_within_delta_on_their_set(name):
    low, high = dead_edges(name, MaskConfig(delta_two_sided=0.05))
    assert low == -high
    x = torch.linspace(low, high, 1001, dtype=torch.float64)
    assert TORCH[name](x).abs().max() <= 0.05 + 1e-12
    assert not left_tail_dies(name, MaskConfig())


@pytest.mark.parametrize("act", [nn.LeakyReLU(2.0), nn.LeakyReLU(-1.5), nn.ELU(3.0), nn.RReLU(1.0, 3.0).eval()])
def test_activations_with_a_slope_above_one_stay_within_delta_on_their_set(act):
    network = nn.Sequential(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4), act, nn.Conv2d(4, 2, 1))
    (site,) = sp.inspect(network, torch.randn(1, 2, 3, 3)).sites
    low, high = dead_edges(site.activation, MaskConfig(delta_two_sided=0.05))
    largest = act(torch.linspace(low, high, 1001)).abs().max()
    assert largest == pytest.approx(0.05, rel=0.02)


def test_without_relu_only_the_input_counts():
    config = MaskConfig(use_relu=False, delta_two_sided=0.1)
    assert {dead_edges(name, config) for name in TORCH} == {(-0.1, 0.1)}


@pytest.mark.parametrize("use_relu", [True, False])
def test_an_unknown_activation_is_refused(use_relu):
    with pytest.raises(ConfigError, match=r"must be one of celu, .* Got 'sigmoid'"):
        dead_edges("sigmoid", MaskConfig(use_relu=use_relu))
