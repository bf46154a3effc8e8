"""The paper's formulas: values, closed-form derivatives, and numbers that METHODS.md states."""

import math

import pytest
import torch

from softprune.masks import MaskConfig
from softprune.masks.functional import (
    alive_probability,
    dead_probability,
    drop_probability,
    hard_mask,
    raised,
    relaxed_sample,
    sparsity_terms,
)

CONFIG = MaskConfig()
EXTREMES = [0.0, -0.0, 1e-45, -1e-45, 1e-38, 1e-8, 0.05, -0.05, 1.0, -1.0, 1e4, 1e20, -1e20, 1e38, -1e38]


def random_parameters(count=2000, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    beta = torch.randn(count, generator=generator, dtype=dtype)
    gamma = torch.randn(count, generator=generator, dtype=dtype)
    noise = torch.logit(torch.rand(count, generator=generator, dtype=dtype).clamp(1e-6, 1 - 1e-6))
    return beta.requires_grad_(), gamma.requires_grad_(), noise


def test_dead_probability_is_the_gaussian_cdf():
    beta, gamma, _ = random_parameters()
    expected = torch.distributions.Normal(beta, gamma.abs() + 1e-8).cdf(torch.tensor(0.05, dtype=torch.float64))
    torch.testing.assert_close(dead_probability(beta, gamma, CONFIG), expected, rtol=0, atol=1e-14)


def test_without_relu_is_the_mass_within_delta():
    beta, gamma, _ = random_parameters()
    config = MaskConfig(use_relu=False, delta_two_sided=0.3)
    normal = torch.distributions.Normal(beta, gamma.abs() + 1e-8)
    expected = normal.cdf(torch.tensor(0.3, dtype=torch.float64)) - normal.cdf(torch.tensor(-0.3, dtype=torch.float64))
    torch.testing.assert_close(dead_probability(beta, gamma, config), expected, rtol=0, atol=1e-14)
    # What follows the BatchNorm does not count.
    assert torch.equal(dead_probability(beta, gamma, config, "selu"), dead_probability(beta, gamma, config))


@pytest.mark.parametrize("name", ["relu6", "hardswish", "silu", "gelu", "mish"])
def test_other_activations_by_monte_carlo(name):
    act = getattr(torch.nn.functional, name)
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(1))
    for beta, gamma in [(0.0, 1.0), (-1.5, 0.5), (-3.0, 1.0), (0.05, 0.1), (-6.0, 0.7)]:
        estimate = (act(beta + gamma * x).abs() <= CONFIG.delta).double().mean()
        phi = dead_probability(torch.tensor(beta), torch.tensor(gamma), CONFIG, name)
        assert abs(estimate - phi) < 5e-3


def test_gradients_equal_the_papers_closed_forms():
    """Equations of sections 3.3: dPhi, dq and dn, chained by hand in float64."""
    beta, gamma, noise = random_parameters()
    phi = dead_probability(beta, gamma, CONFIG)
    n = relaxed_sample(phi, noise, CONFIG)
    by_autograd = torch.autograd.grad(n.sum(), (beta, gamma))

    with torch.no_grad():
        scale = gamma.abs() + CONFIG.eps
        density = torch.exp(-0.5 * ((CONFIG.delta - beta) / scale) ** 2) / (scale * math.sqrt(2 * math.pi))
        q = drop_probability(phi, CONFIG)
        dq_dphi = CONFIG.k * q * (1 - q)
        dn_dq = -n * (1 - n) / (CONFIG.tau * q * (1 - q))
        dphi_dbeta = -density
        dphi_dgamma = -density * (CONFIG.delta - beta) / scale * gamma.sign()
        expected = (dn_dq * dq_dphi * dphi_dbeta, dn_dq * dq_dphi * dphi_dgamma)
    for actual, wanted in zip(by_autograd, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("activation", ["relu", "none", "silu", "hardswish"])
def test_gradients_equal_finite_differences(activation):
    generator = torch.Generator().manual_seed(2)
    beta = (torch.randn(20, generator=generator).double() * 2).requires_grad_()
    gamma = (torch.randn(20, generator=generator).double() + 0.01).requires_grad_()
    noise = torch.zeros(20).double()

    def sample(beta, gamma):
        return relaxed_sample(dead_probability(beta, gamma, CONFIG, activation), noise, CONFIG)

    assert torch.autograd.gradcheck(sample, (beta, gamma), atol=1e-6)


def test_the_stable_sample_is_the_two_way_gumbel_softmax():
    beta, gamma, _ = random_parameters()
    uniform = torch.rand(2, 2000, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    g_off, g_on = -torch.log(-torch.log(uniform.clamp(1e-12, 1 - 1e-12)))
    phi = dead_probability(beta, gamma, CONFIG)
    q = drop_probability(phi, CONFIG)
    logits = torch.stack([torch.log(1 - q) + g_on, torch.log(q) + g_off]) / CONFIG.tau
    torch.testing.assert_close(
        relaxed_sample(phi, g_on - g_off, CONFIG), torch.softmax(logits, 0)[0], rtol=1e-12, atol=1e-13
    )


def test_numbers_of_the_method():
    """METHODS.md 2.1: saturation of q, mean samples, and that everything is on at the start."""
    u = (torch.arange(200_000).double() + 0.5) / 200_000
    noise = torch.logit(u)
    assert drop_probability(torch.tensor(1.0), CONFIG).item() == pytest.approx(1 / (1 + math.exp(-1)))
    assert relaxed_sample(torch.tensor(1.0).double(), noise, CONFIG).mean().item() == pytest.approx(0.297, abs=5e-4)
    assert relaxed_sample(torch.tensor(0.9).double(), noise, CONFIG).mean().item() == pytest.approx(0.70, abs=5e-3)
    at_init = dead_probability(torch.zeros(1), torch.ones(1), CONFIG)
    assert drop_probability(at_init, CONFIG).item() == pytest.approx(1.84e-4, rel=5e-3)


@pytest.mark.parametrize("c", [0.9, 0.95])
def test_hard_mask_is_linear_in_shift_and_scale(c):
    beta, gamma, _ = random_parameters(20_000)
    config = MaskConfig(c=c)
    quantile = {0.9: 1.2815515655446004, 0.95: 1.6448536269514722}[c]
    margin = beta + quantile * (gamma.abs() + config.eps) - config.delta
    keep = hard_mask(dead_probability(beta, gamma, config), config)
    clear = margin.abs() > 1e-9
    assert torch.equal(keep[clear], (margin >= 0)[clear])
    assert 0.02 < 1 - keep.double().mean() < 0.5


def test_a_tie_is_kept_and_nan_is_not_hidden():
    dead = torch.tensor([0.5, 0.75, 0.76, float("nan")])
    assert hard_mask(dead, MaskConfig(c=0.75)).tolist() == [True, True, False, True]


def test_sparsity_loss_and_its_subgradients():
    beta = torch.tensor([0.5, -1.0, 0.25], requires_grad=True)
    gamma = torch.tensor([2.0, -3.0, 0.0], requires_grad=True)
    loss = sparsity_terms(beta, gamma, MaskConfig(s=2.0)).sum()
    assert loss.item() == pytest.approx(-0.25 + 2 * 5)
    loss.backward()
    assert beta.grad.tolist() == [1, 1, 1]
    assert gamma.grad.tolist() == [2, -2, 0]


def test_two_sided_sparsity_loss():
    beta, gamma, _ = random_parameters()
    one = sparsity_terms(beta, gamma, MaskConfig(use_relu=False, s=3.0))
    torch.testing.assert_close(one, 2 * torch.maximum(beta.abs(), 3 * gamma.abs()))
    assert torch.equal(one, sparsity_terms(beta, gamma, MaskConfig(s=3.0), "leaky_relu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("activation", sorted({"relu", "none", "silu", "selu"}))
def test_finite_at_the_extremes(activation, dtype):
    values = torch.tensor(EXTREMES, dtype=dtype)
    beta, gamma = (v.flatten().requires_grad_() for v in torch.meshgrid(values, values, indexing="ij"))
    for noise in (-16.0, 0.0, 16.0):
        dead = dead_probability(beta, gamma, CONFIG, activation)
        n = relaxed_sample(dead, torch.full_like(beta, noise), CONFIG)
        gradients = torch.autograd.grad((n * torch.ones_like(n)).sum(), (beta, gamma))
        for tensor in (dead, n, drop_probability(dead, CONFIG), *gradients):
            assert torch.isfinite(tensor).all()
    terms = sparsity_terms(beta, gamma, CONFIG, "relu")
    assert torch.isfinite(torch.autograd.grad(terms, (beta, gamma), torch.ones_like(terms))[1]).all()


def test_alive_probability_ranks_channels_that_are_all_dead():
    beta = torch.tensor([-6.0, -8.0, -10.0, -12.0])
    gamma = torch.ones(4)
    assert (dead_probability(beta, gamma, CONFIG) == 1).all()
    alive = alive_probability(beta, gamma, CONFIG)
    assert (alive[:-1] > alive[1:]).all()
    two_sided = alive_probability(torch.zeros(3), torch.tensor([0.005, 0.006, 0.007]), CONFIG, "none")
    assert (two_sided[:-1] < two_sided[1:]).all()
    shift, scale = torch.tensor([0.01, 0.02]), torch.tensor([0.005, 0.004])
    left, right = (alive_probability(sign * shift, scale, CONFIG, "none") for sign in (-1, 1))
    assert (right > 0).all()
    assert torch.equal(left, right)


def test_half_precision_is_raised_and_double_kept():
    beta, gamma, _ = random_parameters(64)
    for dtype in (torch.float16, torch.bfloat16):
        half_beta, half_gamma = beta.detach().to(dtype), gamma.detach().to(dtype)
        phi = dead_probability(half_beta, half_gamma, CONFIG)
        assert phi.dtype == torch.float32
        assert torch.equal(phi, dead_probability(half_beta.float(), half_gamma.float(), CONFIG))
        assert sparsity_terms(half_beta, half_gamma, CONFIG).dtype == torch.float32
    assert dead_probability(beta, gamma, CONFIG).dtype == torch.float64
    assert raised(beta) is beta
