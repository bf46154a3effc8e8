"""The paper's mathematics as functions of a BatchNorm's shift and scale, in the order of its section 3.

Equations have their numbers in the paper and, in brackets, their labels in its source.

A channel after BatchNorm is taken as ``x ~ N(beta, gamma^2)``. All functions are elementwise over channels,
differentiable where the paper is, and work in float32 or better: parameters in half precision are raised to
float32, float64 stays. None of the operations used here is lowered by autocast. Value and gradient are
finite for every finite parameter, ``gamma = 0`` and overflowing quotients included.
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
# exp(700) is still a float, and every dipping activation is zero to double precision long before -700.
_FAR = 700.0


def dead_probability(beta: Tensor, gamma: Tensor, config: MaskConfig, activation: str = "relu") -> Tensor:
    """Phi(delta; beta, gamma), equation 4: how likely the channel is (nearly) zero after its activation.

    For ReLU the Gaussian's CDF at delta. For other activations P(|act(x)| <= delta), and "without ReLU"
    P(-delta <= x <= delta); :func:`dead_edges` says where the edges lie.
    """
    return 1.0 - alive_probability(beta, gamma, config, activation)


def alive_probability(beta: Tensor, gamma: Tensor, config: MaskConfig, activation: str = "relu") -> Tensor:
    """1 - Phi, resolved in the far tail, so that dead channels can be ranked among each other.

    In float32, Phi itself is exactly 1 from 5.4 standard deviations on; this is exact up to 13.
    """
    beta, scale = raised(beta), raised(gamma).abs() + config.eps
    edges = dead_edges(activation, config)
    if len(edges) % 2:
        alive = _above(edges[0], beta, scale)
        for entering, leaving in zip(edges[1::2], edges[2::2], strict=True):
            alive = alive - _above(entering, beta, scale) + _above(leaving, beta, scale)
        return alive
    entering, leaving = edges
    # P(x < -delta) as P(-x > delta): the complement of _above would round the small tail away.
    return _above(-entering, -beta, scale) + _above(leaving, beta, scale)


def drop_probability(dead: Tensor, config: MaskConfig) -> Tensor:
    """q, equation 5 (eq:mask_surrogate): the logistic relaxation of the mask, from Phi of :func:`dead_probability`.

    Training does not call it: :func:`relaxed_sample` takes the logit of q.
    """
    return torch.sigmoid(config.k * (dead - config.c))


def relaxed_sample(dead: Tensor, noise: Tensor, config: MaskConfig, drop: Tensor | None = None) -> Tensor:
    """n, equation 7: a relaxed Bernoulli sample in (0, 1), near 1 where the channel is on.

    The paper's two-way Gumbel-softmax over (1 - q, q). The difference of two Gumbel variables is logistic and
    ``log((1 - q) / q) = -k (Phi - c)``, so no logarithm of a vanishing probability is needed. ``noise`` is
    logistic: ``log u - log(1 - u)``. ``drop`` has the log-odds of a budget: a channel at -inf is on, and of the others
    the larger log-odds count, those of the budget or the channel's own.
    """
    dropped = config.k * (dead - config.c)
    if drop is not None:
        dropped = torch.where(drop == -torch.inf, drop, torch.maximum(drop, dropped))
    return torch.sigmoid((noise - dropped) / config.tau)


def hard_mask(dead: Tensor, config: MaskConfig) -> Tensor:
    """m, equation 3 (eq:mask), as booleans, True where the channel is kept: pruned if Phi > c.

    A tie is kept as in the authors' code (the paper prunes it). For ReLU, pruned means
    ``beta + z_c |gamma| < delta`` with ``z_c`` the normal quantile of c. A channel whose parameters are NaN
    is kept, and seen.
    """
    return ~(dead > config.c)


def sparsity_terms(beta: Tensor, gamma: Tensor, config: MaskConfig, activation: str = "relu") -> Tensor:
    """The terms of L_sparse, equation 15 (eq:sparsity_loss): ``beta + s|gamma|``, the upper end of the interval.

    Two-sided where both tails live, equation 17 (eq:sparsity_loss_revised):
    ``|beta + s|gamma|| + |beta - s|gamma||``. The derivative of ``|gamma|`` at 0 is 0.
    """
    beta, spread = raised(beta), config.s * raised(gamma).abs()
    if left_tail_dies(activation, config):
        return beta + spread
    return (beta + spread).abs() + (beta - spread).abs()


def raised(parameter: Tensor) -> Tensor:
    """Return a parameter in half precision in float32."""
    return parameter.float() if parameter.dtype in (torch.float16, torch.bfloat16) else parameter


def _above(edge: float, mean: Tensor, scale: Tensor) -> Tensor:
    """P(x > edge) for x ~ N(mean, scale^2)."""
    # An infinite quotient would meet the density's zero on the way back (0 * inf). The bound is where value
    # and derivative have already vanished, and is detached, so that it adds no gradient of its own.
    bound = _FARTHEST * scale.detach()
    distance = torch.clamp(edge - mean, min=-bound, max=bound)
    return 0.5 * torch.erfc(distance / (scale * math.sqrt(2.0)))


# --- the inputs that an activation maps to (nearly) zero -------------------------------------------------------------
#
# SCP asks how likely a channel x ~ N(beta, gamma^2) dies in the activation after its BatchNorm. For ReLU that is
# x <= delta; for any other activation with act(0) = 0 it is |act(x)| <= delta. The answer is a set of inputs:
#
# - The left tail dies. relu, relu6: x <= delta, the paper's case. hardswish, silu, gelu, mish dip below zero before
#   they die, so the set is x <= e1 and e2 <= x <= e3 (at delta 0.05 SiLU: -4.49, -0.106, 0.095). A channel that sits in
#   the dip puts out a constant that is not zero: it is alive. Where delta exceeds the dip's depth, the set is x <= e3.
# - Both tails live: every other known activation, and none. |x| <= delta, divided by the activation's steepest slope if
#   that exceeds 1: SELU, and a LeakyReLU of slope 2 or an ELU of alpha 2, named leaky_relu*2 and elu*2. The learned
#   slope of a PReLU is taken to be at most 1.


def left_tail_dies(activation: str, config: MaskConfig) -> bool:
    """Whether pushing ``beta`` down kills a channel: it decides the form of the sparsity loss."""
    return _entry(activation).left_tail_dies and config.use_relu


def dead_edges(activation: str, config: MaskConfig) -> tuple[float, ...]:
    """Bounds of the inputs that die, ascending; with an odd number of edges the left tail dies too."""
    if not left_tail_dies(activation, config):
        # Without ReLU the paper bounds |x| itself, whatever follows.
        slope = _entry(activation).steepest_slope if config.use_relu else 1.0
        return (-config.delta_two_sided / slope, config.delta_two_sided / slope)
    dips = _entry(activation).dips
    if dips is None:
        return (config.delta,)
    # Not functools.cache: torch.compile looks through it and would trace the solver.
    key = (activation, config.delta)
    if key not in _solved:
        _solved[key] = _dipping_edges(dips, config.delta)
    return _solved[key]


_NONE = Activation()
_solved: dict[tuple[str, float], tuple[float, ...]] = {}


def _entry(activation: str) -> Activation:
    """Return what is known of an activation, by the name of its operator; "none" is a BatchNorm without one."""
    known = _NONE if activation == "none" else find_activation(activation)
    if known is None:
        raise ConfigError(
            f"An activation must be one of {', '.join(sorted({*activations(), 'none'}))}. Got {activation!r}. "
            'Use "none" for a decision from BatchNorm alone.'
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
    """Bisect to the last float between a negative and a positive value of an increasing function."""
    while True:
        middle = 0.5 * (low + high)
        if not low < middle < high:
            return high
        if function(middle) < 0.0:
            low = middle
        else:
            high = middle
