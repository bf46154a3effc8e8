"""The table of operators: what each does to zeros, constants and channels, and whether it is an activation.

The graph, the search for sites and the masks all read this table. To add an operator, give it an entry with the rule of
a similar one, or write a rule. :func:`add_operator` adds one of the user's own.
"""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from softprune.errors import ConfigError
from softprune.graph import elementwise, layers, movements
from softprune.graph.builder import Activation, Operator, qualified

OPERATORS: dict[str, Operator] = {}
"""Operator name, as :func:`softprune.graph.builder.operator_name` returns it -> what it does."""


def _add(rule: Callable[..., Any], *names: str, **properties: Any) -> None:
    OPERATORS.update({name: Operator(rule, **properties) for name in names})


_BOTH_TAILS_LIVE = Activation()
_SELU_SLOPE = 1.0507009873554805 * 1.6732632423543772  # scale * alpha, the slope at zero from below

# fmt: off
# --- one value at a time ---
_add(elementwise.pointwise, "relu", "relu6", activation=Activation(left_tail_dies=True))
for _name, _dips in {
    "hardswish": lambda x: x * min(max(x + 3.0, 0.0), 6.0) / 6.0,
    "silu": lambda x: x / (1.0 + math.exp(-x)),
    "gelu": lambda x: 0.5 * x * math.erfc(-x / math.sqrt(2.0)),
    "mish": lambda x: x * math.tanh(math.log1p(math.exp(x))),
}.items():
    _add(elementwise.pointwise, _name, activation=Activation(left_tail_dies=True, dips=_dips))
_add(
    elementwise.pointwise, "leaky_relu", "rrelu", "elu", "hardtanh", "clamp", "clamp_min",
    activation=_BOTH_TAILS_LIVE, by_values=True,
)
_add(
    elementwise.pointwise, "celu", "tanh", "softsign", "tanhshrink", "softshrink", "hardshrink",
    activation=_BOTH_TAILS_LIVE,
)
_add(elementwise.pointwise, "selu", activation=Activation(steepest_slope=_SELU_SLOPE))
_add(layers.prelu, "prelu", activation=_BOTH_TAILS_LIVE)
_add(elementwise.pointwise, "sigmoid", "hardsigmoid", at_zero=0.5)
_add(elementwise.pointwise, "softplus", at_zero=0.69)
_add(elementwise.pointwise, "log_sigmoid", at_zero=-0.69)
_add(elementwise.pointwise, "exp", "exp2", "cos", "cosh", "logical_not", at_zero=1.0)
_add(elementwise.pointwise, "log", "log2", "log10", at_zero=-math.inf)
_add(
    elementwise.pointwise, "abs", "neg", "expm1", "log1p", "sqrt", "rsqrt", "reciprocal", "square", "pow", "clamp_max",
    "threshold", "floor", "ceil", "round", "trunc", "frac", "sign", "sin", "sinh", "tan", "atan", "asinh", "erf",
    "nan_to_num", "isnan", "isinf",
)
_add(elementwise.copied, "clone", "to", "_to_copy", "alias", "detach", "lift_fresh_copy", transparent=True)
_add(
    elementwise.dropout, "dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "native_dropout",
    transparent=True,
)
_add(elementwise.fill, "zeros_like", "ones_like", "full_like")
_add(elementwise.zeros, "zeros", "new_zeros")
_add(elementwise.constant, "new_ones", "new_full", "new_empty")
# --- two values ---
_add(
    elementwise.pointwise, "add", "sub", "rsub", "mul", "div", "maximum", "minimum", "lerp", "remainder", "fmod",
    "floor_divide", "atan2", "max_unpool2d", "max_unpool3d", "gt", "ge", "lt", "le", "eq", "ne", "logical_and",
    "logical_or", "logical_xor", "__and__", "__or__", "bitwise_and", "bitwise_or",
)
_add(elementwise.choice, "where", "masked_fill")
_add(elementwise.accumulation, "index_add")
# --- within each channel, over space ---
for _rank in ("1d", "2d", "3d"):
    _add(
        elementwise.spatial, f"max_pool{_rank}", f"max_pool{_rank}_with_indices", f"adaptive_max_pool{_rank}",
        f"adaptive_avg_pool{_rank}", f"upsample_nearest{_rank}", f"reflection_pad{_rank}",
        f"replication_pad{_rank}", keeps_constants=True, transparent=True,
    )
    _add(
        elementwise.spatial, f"avg_pool{_rank}", f"_upsample_nearest_exact{_rank}", f"lp_pool{_rank}", transparent=True
    )
_add(
    elementwise.spatial, "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
    "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "grid_sampler", "grid_sampler_2d", "grid_sampler_3d",
    "fractional_max_pool2d", "fractional_max_pool3d", transparent=True,
)
_add(elementwise.along_space, "softmax", "log_softmax", at_zero=math.nan)
_add(elementwise.along_space, "cumsum", "sort")
# --- channels together ---
_add(layers.reduction, "mean", "amax", "amin", "max", "min", keeps_constants=True)
_add(layers.reduction, "sum", "var", "prod", "linalg_vector_norm")
_add(layers.reduction, "logsumexp", "std", "argmax", "argmin", at_zero=math.nan)  # std has no finite gradient at zero
_add(layers.product, "matmul", "mm", "mv", "bmm", "einsum")
_add(layers.convolution, "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
_add(layers.deformable, "torchvision::deform_conv2d")
_add(layers.linear, "linear")
_add(layers.norm, "batch_norm", "instance_norm")
_add(layers.recurrent, "lstm", "gru", "rnn_tanh", "rnn_relu")
# --- movements of data ---
_add(movements.view, "view", "reshape", "_unsafe_view", "flatten", "unflatten", "ravel", transparent=True)
_add(movements.view_as, "view_as", "reshape_as", "expand_as")
_add(movements.expansion, "expand")
_add(movements.movement, "permute", "transpose", "t", "contiguous", "unsqueeze", "flip", transparent=True)
_add(movements.movement, "repeat", "repeat_interleave", "pixel_unshuffle")
_add(movements.squeeze, "squeeze", transparent=True)
_add(movements.shuffle, "channel_shuffle", "native_channel_shuffle", transparent=True)
_add(movements.pixel_shuffle, "pixel_shuffle")
_add(movements.patches, "im2col", "col2im")
_add(movements.split, "chunk", "split", "split_with_sizes", "tensor_split", transparent=True)
_add(movements.movement, "getitem", transparent=True)  # of pieces: the graph follows it without a rule
_add(movements.piece, "slice", "narrow", transparent=True)
_add(movements.positions, "select", "unbind", "roll", "rot90", "unfold")
_add(movements.indexing, "index", "index_select", transparent=True)
_add(movements.concatenation, "cat", transparent=True)
_add(movements.concatenation, "stack")
_add(movements.padding, "pad", "constant_pad_nd", transparent=True)
# fmt: on


def add_operator(name: str, entry: Operator) -> None:
    """Tell softprune what an operator of your own (``torch.library``) does, so that channels can be cut through it.

    Args:
        name: ``"mine::act"``, or as `inspect` shows it, ``"mine.act.default"``.
        entry: What it does, such as ``Operator(pointwise, activation=Activation(left_tail_dies=True))``, with a rule
            that :mod:`softprune.graph` has.
    """
    space, name, *_ = [*re.split(r"::|\.", name), ""]
    if not space or not name:
        raise ConfigError(f"An operator's name must be namespace::name. Got {space!r}; write 'mine::{space}', say.")
    if not callable(entry.rule):
        raise ConfigError(
            f"The rule of an operator must be a function. Got {entry.rule!r}; pass one of softprune.graph, such as "
            "pointwise."
        )
    OPERATORS[qualified(space, name)] = entry


def activations() -> dict[str, Activation]:
    """Return the activations that a dropped channel passes as zero, by the name of their operator."""
    return {name: entry.activation for name, entry in OPERATORS.items() if entry.activation is not None}


def find_activation(name: str) -> Activation | None:
    """Return what is known of an activation by the name that :meth:`Operator.activation_of` gives it."""
    base, _, slope = name.partition("*")
    entry = OPERATORS.get(base)
    known = None if entry is None else entry.activation
    return replace(known, steepest_slope=float(slope)) if known and slope else known
