"""The table of operators: what each does to zeros, constants and channels, and whether it is an activation.

The rules, the search for sites and the masks all read this table. To add an operator, give it an entry with the kind of
an existing rule, or write a rule for a new kind with :func:`rule`. :func:`add_operator` adds one of the user's own.
"""

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from softprune.errors import ConfigError


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
    by_values: bool = False
    """Whether its arguments decide if it is an activation, and which: bounds of a clip, the slope of a LeakyReLU."""


OPERATORS: dict[str, Operator] = {}
"""Operator name, as :func:`operator_name` returns it -> what it does."""


def _add(kind: str, *names: str, **properties: Any) -> None:
    OPERATORS.update({name: Operator(kind, **properties) for name in names})


_BOTH_TAILS_LIVE = Activation()
_SELU_SLOPE = 1.0507009873554805 * 1.6732632423543772  # scale * alpha, the slope at zero from below

# fmt: off
# --- one value at a time ---
_add("pointwise", "relu", "relu6", activation=Activation(left_tail_dies=True))
for _name, _dips in {
    "hardswish": lambda x: x * min(max(x + 3.0, 0.0), 6.0) / 6.0,
    "silu": lambda x: x / (1.0 + math.exp(-x)),
    "gelu": lambda x: 0.5 * x * math.erfc(-x / math.sqrt(2.0)),
    "mish": lambda x: x * math.tanh(math.log1p(math.exp(x))),
}.items():
    _add("pointwise", _name, activation=Activation(left_tail_dies=True, dips=_dips))
_add(
    "pointwise", "leaky_relu", "rrelu", "elu", "hardtanh", "clamp", "clamp_min",
    activation=_BOTH_TAILS_LIVE, by_values=True,
)
_add(
    "pointwise", "celu", "tanh", "softsign", "tanhshrink", "softshrink", "hardshrink", activation=_BOTH_TAILS_LIVE,
)
_add("pointwise", "selu", activation=Activation(steepest_slope=_SELU_SLOPE))
_add("pointwise", "sigmoid", "hardsigmoid", at_zero=0.5)
_add("pointwise", "softplus", at_zero=0.69)
_add("pointwise", "log_sigmoid", at_zero=-0.69)
_add("pointwise", "exp", "exp2", "cos", "cosh", "logical_not", at_zero=1.0)
_add("pointwise", "log", "log2", "log10", at_zero=-math.inf)
_add(
    "pointwise", "abs", "neg", "expm1", "log1p", "sqrt", "rsqrt", "reciprocal", "square", "pow", "clamp_max",
    "threshold", "floor", "ceil", "round", "trunc", "frac", "sign", "sin", "sinh", "tan", "atan", "asinh", "erf",
    "nan_to_num", "isnan", "isinf",
)
_add("copy", "clone", "to", "_to_copy", "type_as", "alias", "detach", "lift_fresh_copy", transparent=True)
_add("fill", "zeros_like", "ones_like", "full_like")
_add("zeros", "zeros", "new_zeros")
_add("constant", "new_ones", "new_full", "new_empty")
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
_add("reduce", "sum", "var", "prod", "linalg_vector_norm")
_add("reduce", "logsumexp", "std", "argmax", "argmin", at_zero=math.nan)  # std has no finite gradient at zero
_add("along", "softmax", "log_softmax", at_zero=math.nan)
_add("along", "cumsum", "sort")
# --- two tensors, value by value ---
_add(
    "arithmetic", "add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "true_divide", "maximum",
    "minimum", "lerp", "remainder", "fmod", "floor_divide", "atan2", "max_unpool2d", "max_unpool3d",
)
_add("add_product", "addcmul", "addcdiv")
_add("arithmetic", "gt", "ge", "lt", "le", "eq", "ne", "logical_and", "logical_or", "logical_xor")
_add("arithmetic", "__and__", "__or__", "bitwise_and", "bitwise_or")
_add("choose", "where", "masked_fill")
_add("accumulate", "index_add")
_add("gated", "glu")
# --- with weights ---
_add("conv", "conv1d", "conv2d", "conv3d")
_add("conv_transpose", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
_add("deform_conv", "torchvision::deform_conv2d")
_add("linear", "linear")
_add("product", "matmul", "mm", "mv", "bmm", "einsum")
_add("batch_norm", "batch_norm")
_add("instance_norm", "instance_norm")
_add("prelu", "prelu", activation=_BOTH_TAILS_LIVE)
_add("recurrent", "lstm", "gru", "rnn_tanh", "rnn_relu")
# --- movements of data ---
_add("reshape", "view", "reshape", "_unsafe_view", "flatten", "unflatten", "ravel", transparent=True)
_add("as_another", "view_as", "reshape_as", "expand_as")
_add("expand", "expand")
_add(
    "move", "permute", "transpose", "t", "mT", "mH", "numpy_T", "matrix_H", "adjoint", "contiguous", "unsqueeze",
    "movedim", "moveaxis", "swapaxes", "swapdims", "flip", "fliplr", "flipud", transparent=True,
)
_add("move", "repeat", "tile", "repeat_interleave", "pixel_unshuffle")
_add("squeeze", "squeeze", transparent=True)
_add("pixel_shuffle", "pixel_shuffle")
_add("channel_shuffle", "channel_shuffle", "native_channel_shuffle", transparent=True)
_add("patches", "im2col", "col2im")
_add("concatenate", "cat", "concat", "concatenate", "hstack", "vstack", "dstack", transparent=True)
_add("concatenate", "row_stack", "column_stack", transparent=True)
_add("concatenate", "stack")
_add("chunk", "chunk", transparent=True)
_add("split", "split", "split_with_sizes", "tensor_split", transparent=True)
_add("slice", "slice", "narrow", transparent=True)
_add("getitem", "getitem", transparent=True)
_add("pick", "select", "unbind", "roll", "rot90", "unfold")
_add("index", "index", "index_select", transparent=True)
_add("pad", "pad", "constant_pad_nd", transparent=True)
# fmt: on

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


def add_operator(name: str, entry: Operator) -> None:
    """Tell softprune what an operator of your own (``torch.library``) does, so that channels can be cut through it.

    Args:
        name: ``"mine::act"``, or as `inspect` shows it, ``"mine.act.default"``.
        entry: What it does, such as ``Operator("pointwise", activation=Activation(left_tail_dies=True))``.
    """
    space, name, *_ = [*re.split(r"::|\.", name), ""]
    if not space or not name:
        raise ConfigError(f"An operator's name must be namespace::name. Got {space!r}; write 'mine::{space}', say.")
    if entry.kind not in RULES:
        raise ConfigError(f"The kind of an operator must be one of {', '.join(RULES)}. Got {entry.kind!r}.")
    OPERATORS[_qualified(space, name)] = entry


def activations() -> dict[str, Activation]:
    """Return the activations that a dropped channel passes as zero, by the name of their operator."""
    return {name: entry.activation for name, entry in OPERATORS.items() if entry.activation is not None}


def operator_name(node: Node) -> str:
    """Return the name in the table: ``aten::add_.Tensor`` -> ``add``, ``mine::add_`` -> ``mine::add``."""
    if node.target is operator.getitem:
        return "getitem"
    schema = getattr(node.target, "_schema", None)
    return str(node.target) if schema is None else _qualified(*schema.name.split("::"))


def _qualified(space: str, name: str) -> str:
    name = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    return name if space == "aten" else f"{space}::{name}"


def argument(node: Node, index: int, name: str, default: Any = None) -> Any:
    """Return an argument of the node's operator, given by position or by name."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def activation_of(node: Node) -> str | None:
    """Return the activation that `node` is, or None. Where arguments decide, its values tell.

    Arguments that make it steeper than 1 are named, as ``"leaky_relu*2"``; see :func:`find_activation`.
    """
    name = operator_name(node)
    entry = OPERATORS.get(name)
    if entry is None or entry.activation is None:
        return None
    if not entry.by_values:
        return name
    if len(node.all_input_nodes) > 1:  # a bound that is a tensor
        return None
    args, kwargs = map_arg((node.args, node.kwargs), lambda _: _POINTS.clone())  # it may write in place
    values = node.target(*args, **kwargs)  # type: ignore[operator]
    if not values[_POINTS <= 0].any():
        return "relu6" if values.equal(_POINTS.clamp(0, 6)) else "relu"
    if values[_POINTS == 0].any():
        return None
    slope = f"{(values / _POINTS).nan_to_num().abs().max():.3g}"
    return f"{name}*{slope}" if float(slope) > 1 else name


def find_activation(name: str) -> Activation | None:
    """Return what is known of an activation by the name that :func:`activation_of` gives it."""
    base, _, slope = name.partition("*")
    entry = OPERATORS.get(base)
    known = None if entry is None else entry.activation
    return replace(known, steepest_slope=float(slope)) if known and slope else known


# On the CPU, whatever the default device is at the import. The slope at zero shows at the smallest two.
_POINTS = torch.tensor([*range(-8, 1), -(2.0**-10), 2.0**-10, *range(1, 9)], device="cpu", dtype=torch.float64)
