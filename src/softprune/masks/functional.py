"""The paper's mathematics as functions of a BatchNorm's shift and scale, in the order of section 3.

Equations have their numbers in the paper and, in brackets, their labels in its source.

A channel after BatchNorm is assumed to be ``x ~ N(beta, gamma^2)``. All functions are elementwise over channels,
differentiable where the paper is, and compute in float32 or float64: parameters in half precision are cast to
float32. Autocast does not lower any of the operations. Values and gradients are finite for all finite parameters,
including ``gamma = 0`` and overflowing quotients.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from softprune.errors import ConfigError
from softprune.graph import Activation
from softprune.graph.operators import activations, find_activation
from softprune.mask_config import MaskConfig

# erfc and the normal density are 0 (or 2) in float64 beyond this many standard deviations.
_FARTHEST = 40.0
# exp(700) does not overflow in float64, and at -700 every dipping activation is zero in double precision.
_FAR = 700.0


def dead_probability(beta: Tensor, gamma: Tensor, config: MaskConfig, activation: str = "relu") -> Tensor:
    """Return Phi(delta; beta, gamma), equation 4: the probability that the channel is dead after its activation.

    For ReLU, this is the Gaussian CDF at delta. For other activations, it is P(|act(x)| <= delta), and "without ReLU"
    it is P(-delta <= x <= delta). :func:`dead_edges` computes the bounds.
    """
    return 1.0 - alive_probability(beta, gamma, config, activation)


def alive_probability(beta: Tensor, gamma: Tensor, config: MaskConfig, activation: str = "relu") -> Tensor:
    """Return 1 - Phi, accurate in the far tail, so that dead channels can be ranked.

    In float32, Phi rounds to 1 beyond 5.4 standard deviations; this function is accurate up to 13.
    """
    beta, scale = raised(beta), raised(gamma).abs() + config.eps
    edges = dead_edges(activation, config)
    if len(edges) % 2:
        alive = _above(edges[0], beta, scale)
        for entering, leaving in zip(edges[1::2], edges[2::2], strict=True):
            alive = alive - _above(entering, beta, scale) + _above(leaving, beta, scale)
        return alive
    entering, leaving = edges
    # Compute P(x < -delta) as P(-x > delta), since the complement of _above would lose a small tail to rounding.
    return _above(-entering, -beta, scale) + _above(leaving, beta, scale)


def drop_probability(dead: Tensor, config: MaskConfig) -> Tensor:
    """Return q, equation 5 (eq:mask_surrogate): the logistic relaxation of the mask, from the dead probability Phi.

    Training does not use it, since :func:`relaxed_sample` computes with the logit of q.
    """
    return torch.sigmoid(config.k * (dead - config.c))


def relaxed_sample(dead: Tensor, noise: Tensor, config: MaskConfig, drop: Tensor | None = None) -> Tensor:
    """Return n, equation 7: a relaxed Bernoulli sample in (0, 1), close to 1 if the channel is on.

    This equals the paper's two-way Gumbel-softmax over (1 - q, q): the difference of two Gumbel variables is logistic
    and ``log((1 - q) / q) = -k (Phi - c)``, so the logarithm of a vanishing probability is not needed. ``noise`` is
    logistic: ``log u - log(1 - u)``. ``drop`` contains the log-odds of a budget: channels at -inf are on; for others,
    the maximum of the log-odds of the budget and of the channel itself is used.
    """
    dropped = config.k * (dead - config.c)
    if drop is not None:
        dropped = torch.where(drop == -torch.inf, drop, torch.maximum(drop, dropped))
    return torch.sigmoid((noise - dropped) / config.tau)


def hard_mask(dead: Tensor, config: MaskConfig) -> Tensor:
    """Return m, equation 3 (eq:mask), as booleans: False (pruned) if Phi > c, True (kept) otherwise.

    Ties are kept as in the authors' code, while the paper prunes them. For ReLU, a channel is pruned if
    ``beta + z_c |gamma| < delta``, where ``z_c`` is the normal quantile of c. Channels with NaN parameters are kept,
    so that NaN shows in the outputs.
    """
    return ~(dead > config.c)


def sparsity_terms(beta: Tensor, gamma: Tensor, config: MaskConfig, activation: str = "relu") -> Tensor:
    """Return the terms of L_sparse, equation 15 (eq:sparsity_loss): ``beta + s|gamma|``, the end of the interval.

    If both tails are alive, return the two-sided terms of equation 17 (eq:sparsity_loss_revised),
    ``|beta + s|gamma|| + |beta - s|gamma||``. The derivative of ``|gamma|`` at 0 is 0.
    """
    beta, spread = raised(beta), config.s * raised(gamma).abs()
    if left_tail_dies(activation, config):
        return beta + spread
    return (beta + spread).abs() + (beta - spread).abs()


def raised(parameter: Tensor) -> Tensor:
    """Cast parameters in half precision to float32."""
    return parameter.float() if parameter.dtype in (torch.float16, torch.bfloat16) else parameter


def _above(edge: float, mean: Tensor, scale: Tensor) -> Tensor:
    """Return P(x > edge) for x ~ N(mean, scale^2)."""
    # Without the clamp, an infinite quotient would give 0 * inf in the backward pass. At the bound, value and
    # derivative have already vanished; it is detached so that it has no gradient.
    bound = _FARTHEST * scale.detach()
    distance = torch.clamp(edge - mean, min=-bound, max=bound)
    return 0.5 * torch.erfc(distance / (scale * math.sqrt(2.0)))


# --- the inputs that an activation maps to (nearly) zero -------------------------------------------------------------
#
# SCP needs the probability that the activation maps x ~ N(beta, gamma^2) to (nearly) zero: x <= delta for ReLU, and
# |act(x)| <= delta for other activations with act(0) = 0. The set of these inputs depends on the activation:
#
# - The left tail dies. For relu and relu6, it is x <= delta, the case of the paper. hardswish, silu, gelu and mish dip
#   below zero before, so it is x <= e1 and e2 <= x <= e3 (SiLU with delta 0.05: -4.49, -0.106, 0.095). A channel in the
#   dip outputs a constant other than zero and is alive. If delta exceeds the depth of the dip, it is x <= e3.
# - Both tails are alive, for all other known activations and for none. It is |x| <= delta, divided by the steepest
#   slope of the activation if that exceeds 1, as in SELU, LeakyReLU with slope 2 or ELU with alpha 2 (leaky_relu*2,
#   elu*2). The learned slope of a PReLU is assumed to be at most 1.


def left_tail_dies(activation: str, config: MaskConfig) -> bool:
    """Return whether lowering ``beta`` kills a channel, which determines the form of the sparsity loss."""
    return _entry(activation).left_tail_dies and config.use_relu


def dead_edges(activation: str, config: MaskConfig) -> tuple[float, ...]:
    """Return the bounds of the inputs that die, ascending. With an odd number of bounds, the left tail dies too."""
    if not left_tail_dies(activation, config):
        # "Without ReLU", the paper bounds |x| for all activations.
        slope = _entry(activation).steepest_slope if config.use_relu else 1.0
        return (-config.delta_two_sided / slope, config.delta_two_sided / slope)
    dips = _entry(activation).dips
    if dips is None:
        return (config.delta,)
    # torch.compile would ignore functools.cache and trace the solver.
    key = (activation, config.delta)
    if key not in _solved:
        _solved[key] = _dipping_edges(dips, config.delta)
    return _solved[key]


_NONE = Activation()
_solved: dict[tuple[str, float], tuple[float, ...]] = {}


def _entry(activation: str) -> Activation:
    """Return the entry of an activation by the name of its operator; "none" stands for no activation."""
    known = _NONE if activation == "none" else find_activation(activation)
    if known is None:
        raise ConfigError(
            f"An activation must be one of {', '.join(sorted({*activations(), 'none'}))}. Got {activation!r}. "
            'Use "none" to decide by the BatchNorm alone.'
        )
    return known


def _dipping_edges(act: Callable[[float], float], delta: float) -> tuple[float, ...]:
    """Solve ``|act(x)| = delta`` for an activation that falls to one minimum and then rises."""
    lowest = min((-number / 1000 for number in range(4001)), key=act)
    rise = _crossing(lambda x: act(x) - delta, 0.0, _FAR)
    if -act(lowest) <= delta:
        return (rise,)
    return (_crossing(lambda x: -delta - act(x), -_FAR, lowest), _crossing(lambda x: act(x) + delta, lowest, 0.0), rise)


def _crossing(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the zero of an increasing function in [low, high] by bisection, to the last float."""
    while True:
        middle = 0.5 * (low + high)
        if not low < middle < high:
            return high
        if function(middle) < 0.0:
            low = middle
        else:
            high = middle
