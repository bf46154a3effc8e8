"""The table of operators: what each does to zeros, constants and channels, and whether it is an activation.

The rules, the search for sites and the masks all read this table. To add an operator, give it an entry with the kind of
an existing rule, or write a rule for a new kind with :func:`rule`.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.fx import Node


@dataclass(frozen=True)
class Activation:
    """An activation f with f(0) = 0: which inputs it maps to (nearly) zero."""

    left_tail_dies: bool = False
    """Whether f(x) goes to 0 for x to minus infinity."""
    steepest_slope: float = 1.0
    """The largest |f'|, for activations whose both tails live."""
    dips: Callable[[float], float] | None = None
    """f itself, where it falls below zero before its left tail dies."""


@dataclass(frozen=True)
class Operator:
    """What softprune knows about one operator."""

    kind: str
    """The rule that relates its channels."""
    at_zero: float = 0.0
    """The image of zero. Other than zero, a dropped channel would not be dead after it."""
    keeps_constants: bool = False
    """Whether a channel that is constant over space stays at this constant."""
    transparent: bool = False
    """Whether it hands channels on, so that a BatchNorm's activation may stand after it."""
    activation: Activation | None = None
    clips: bool = False
    """Whether its bounds decide if it is an activation, and which."""


OPERATORS: dict[str, Operator] = {}
"""Operator name without overload and in-place underscore -> what it does."""


def _add(kind: str, *names: str, **properties: Any) -> None:
    OPERATORS.update({name: Operator(kind, **properties) for name in names})


def _hardswish(x: float) -> float:
    return x * min(max(x + 3.0, 0.0), 6.0) / 6.0


def _silu(x: float) -> float:
    return x / (1.0 + math.exp(-x))


def _gelu(x: float) -> float:
    return 0.5 * x * math.erfc(-x / math.sqrt(2.0))


def _mish(x: float) -> float:
    return x * math.tanh(math.log1p(math.exp(x)))


_BOTH_TAILS_LIVE = Activation()
_SELU_SLOPE = 1.0507009873554805 * 1.6732632423543772  # scale * alpha, the slope at zero from below

# fmt: off
# --- one value at a time ---
_add("pointwise", "relu", "relu6", activation=Activation(left_tail_dies=True))
_add("pointwise", "hardswish", activation=Activation(left_tail_dies=True, dips=_hardswish))
_add("pointwise", "silu", activation=Activation(left_tail_dies=True, dips=_silu))
_add("pointwise", "gelu", activation=Activation(left_tail_dies=True, dips=_gelu))
_add("pointwise", "mish", activation=Activation(left_tail_dies=True, dips=_mish))
_add(
    "pointwise", "leaky_relu", "rrelu", "elu", "celu", "tanh", "softsign", "tanhshrink", "softshrink",
    "hardshrink", activation=_BOTH_TAILS_LIVE,
)
_add("pointwise", "selu", activation=Activation(steepest_slope=_SELU_SLOPE))
_add("pointwise", "hardtanh", activation=_BOTH_TAILS_LIVE, clips=True)
_add("pointwise", "clamp", "clamp_min", clips=True)
_add("pointwise", "sigmoid", "hardsigmoid", at_zero=0.5)
_add("pointwise", "softplus", at_zero=0.69)
_add("pointwise", "log_sigmoid", at_zero=-0.69)
_add("pointwise", "exp", "cos", "logical_not", at_zero=1.0)
_add(
    "pointwise", "abs", "neg", "expm1", "log1p", "sqrt", "rsqrt", "reciprocal", "square", "pow", "clamp_max",
    "threshold", "floor", "ceil", "round", "sign", "sin", "erf",
)
_add("copy", "clone", "to", "_to_copy", "type_as", "alias", "detach", "lift_fresh_copy", transparent=True)
_add("fill", "zeros_like", "ones_like", "full_like")
_add("zeros", "zeros", "new_zeros")
_add(
    "random", "dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "native_dropout",
    transparent=True,
)
# --- within each channel, over space ---
for _rank in ("1d", "2d", "3d"):
    _add(
        "spatial", f"max_pool{_rank}", f"max_pool{_rank}_with_indices", f"adaptive_max_pool{_rank}",
        f"adaptive_avg_pool{_rank}", f"upsample_nearest{_rank}", f"reflection_pad{_rank}",
        f"replication_pad{_rank}", keeps_constants=True, transparent=True,
    )
    _add(
        "spatial", f"avg_pool{_rank}", f"_upsample_nearest_exact{_rank}", f"lp_pool{_rank}",
        transparent=True,
    )
_add(
    "spatial", "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
    "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "grid_sampler", "grid_sampler_2d", "grid_sampler_3d",
    "fractional_max_pool2d", "fractional_max_pool3d", transparent=True,
)
_add("reduce", "mean", "amax", "amin", "max", "min", keeps_constants=True)
_add("reduce", "sum", "var", "std")
_add("along", "softmax", "log_softmax", at_zero=math.nan)
_add("along", "cumsum", "sort")
# --- two tensors, value by value ---
_add("arithmetic", "add", "sub", "rsub", "mul", "div", "true_divide", "maximum", "minimum", "lerp")
_add("arithmetic", "gt", "ge", "lt", "le", "eq", "ne", "logical_and", "logical_or", "logical_xor")
_add("choose", "where", "masked_fill")
_add("gated", "glu")
# --- with weights ---
_add("conv", "conv1d", "conv2d", "conv3d")
_add("conv_transpose", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
_add("linear", "linear")
_add("batch_norm", "batch_norm")
_add("prelu", "prelu", activation=_BOTH_TAILS_LIVE)
_add("recurrent", "lstm", "gru", "rnn_tanh", "rnn_relu")
# --- movements of data ---
_add("reshape", "view", "reshape", "_unsafe_view", "flatten", "unflatten", transparent=True)
_add("as_another", "view_as", "reshape_as", "expand_as")
_add("expand", "expand")
_add(
    "move", "permute", "transpose", "t", "contiguous", "unsqueeze", "movedim", "swapaxes", "swapdims", "flip",
    transparent=True,
)
_add("move", "repeat", "tile", "repeat_interleave", "pixel_unshuffle")
_add("squeeze", "squeeze", transparent=True)
_add("pixel_shuffle", "pixel_shuffle")
_add("channel_shuffle", "channel_shuffle", "native_channel_shuffle", transparent=True)
_add("concatenate", "cat", "concat", "concatenate", transparent=True)
_add("concatenate", "stack")
_add("chunk", "chunk", transparent=True)
_add("split", "split", "split_with_sizes", "tensor_split", transparent=True)
_add("slice", "slice", "narrow", transparent=True)
_add("getitem", "getitem", transparent=True)
_add("pick", "select", "unbind", "roll")
_add("index", "index", "index_select")
_add("pad", "pad", "constant_pad_nd", transparent=True)
# fmt: on

ACTIVATIONS = {name: entry.activation for name, entry in OPERATORS.items() if entry.activation is not None}
"""Activations that a dropped channel passes as zero."""

Rule = Callable[[Any, Node], Any]
"""(GraphBuilder, node) -> the node's value."""

RULES: dict[str, Rule] = {}
"""Kind of operator -> how channels pass through it."""


def rule(kind: str) -> Callable[[Rule], Rule]:
    """Register the rule for all operators of one kind."""

    def register(function: Rule) -> Rule:
        RULES[kind] = function
        return function

    return register


def operator_name(node: Node) -> str:
    """Return the name in the table: ``aten::add_.Tensor`` -> ``add``."""
    if node.target is operator.getitem:
        return "getitem"
    schema = getattr(node.target, "_schema", None)
    name = schema.name.split("::")[-1] if schema is not None else str(node.target)
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def argument(node: Node, index: int, name: str, default: Any = None) -> Any:
    """Return an argument of the node's operator, given by position or by name."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def activation_of(node: Node) -> str | None:
    """Return the activation that `node` is, or None. Clips are activations depending on their bounds."""
    name = operator_name(node)
    if name not in OPERATORS or not OPERATORS[name].clips:
        return name if name in ACTIVATIONS else None
    low, high = _bounds(name, node)
    if any(isinstance(bound, Node) for bound in (low, high)):
        return None
    if low == 0:
        return "relu6" if high == 6 else "relu"
    return "hardtanh" if low is not None and high is not None and low < 0 < high else None


def _bounds(name: str, node: Node) -> tuple[Any, Any]:
    first, second = ("min_val", "max_val") if name == "hardtanh" else ("min", "max")
    default = (-1.0, 1.0) if name == "hardtanh" else (None, None)
    return argument(node, 1, first, default[0]), argument(node, 2, second, default[1])
