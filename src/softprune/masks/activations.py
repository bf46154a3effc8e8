"""The inputs that an activation maps to (nearly) zero.

SCP asks how likely a channel ``x ~ N(beta, gamma^2)`` dies in the activation after its BatchNorm. For ReLU
that is ``x <= delta``; for any other activation with ``act(0) = 0`` it is ``|act(x)| <= delta``.
Its answer is a set of inputs bounded by one, two or three edges, solved once in Python:

===============================  ==============================================================
the left tail dies               ``relu, relu6``: ``x <= delta``, the paper's case.
                                 ``hardswish, silu, gelu, mish``: these dip below zero before they
                                 die, so the set is ``x <= e1`` and ``e2 <= x <= e3`` (at delta 0.05
                                 SiLU: -4.49, -0.106, 0.095). A channel that sits in the dip puts
                                 out a constant that is not zero: it is alive. Where delta exceeds
                                 the depth of the dip, the set is ``x <= e3``.
both tails live                  every other known activation, and none: ``|x| <= delta``, divided by
                                 the activation's steepest slope if that exceeds 1: SELU, and a
                                 LeakyReLU of slope 2 or an ELU of alpha 2, named ``leaky_relu*2`` and
                                 ``elu*2``. The learned slope of a PReLU divides it, too, as it
                                 is at each step: in `masks.py`.
===============================  ==============================================================
"""

from collections.abc import Callable

from softprune.errors import ConfigError
from softprune.graph import Activation
from softprune.graph.operators import activations, find_activation
from softprune.mask_config import MaskConfig

# exp(700) is still a float, and every dipping activation is zero to double precision long before -700.
_FAR = 700.0


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
    lowest = _minimum(act)
    rise = _crossing(lambda x: act(x) - delta, 0.0, _FAR)
    if -act(lowest) <= delta:
        return (rise,)
    return (_crossing(lambda x: -delta - act(x), -_FAR, lowest), _crossing(lambda x: act(x) + delta, lowest, 0.0), rise)


def _minimum(function: Callable[[float], float]) -> float:
    low, high = -4.0, 0.0
    while high - low > 1e-9:
        third = (high - low) / 3.0
        if function(low + third) > function(high - third):
            low += third
        else:
            high -= third
    return 0.5 * (low + high)


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
