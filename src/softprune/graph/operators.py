"""The operator table: effect of each operator on zeros, constants and channels, and whether it is an activation.

The graph, the search for sites and the masks use this table. To support another operator, add an entry with the rule of
a similar one, or write a rule. :func:`add_operator` adds custom operators.
"""

import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import Node

from softprune.errors import ConfigError
from softprune.graph import movements
from softprune.graph.builder import (
    Activation,
    GraphBuilder,
    Opaque,
    Operator,
    Value,
    argument,
    equal,
    operator_name,
    qualified,
)
from softprune.graph.channels import PAD, BinaryOp, ChannelwiseOp, Evaluate, IntArray, LayerOp, Use, identity
from softprune.graph.modules import is_known_norm

SUMS = ("add", "sub", "rsub")
PRODUCTS = ("mul", "max_unpool2d", "max_unpool3d")
"""Operators that are zero if either operand is zero. The indices that max_unpool reads are never constants."""


# --- rules: one tensor ------------------------------------------------------------------------------------------------


def pointwise(builder: GraphBuilder, node: Node, entry: Operator) -> Any:
    """Rule of elementwise operators: activations and arithmetic."""
    given = [place for place, each in enumerate(node.args) if isinstance(each, Node)]
    if len(given) == 2:
        return _two_tensors(builder, node)
    if not given or not isinstance(node.meta["val"], Tensor):
        raise Opaque("is used in an unusual way")
    value = builder.tensor(node.args[given[0]])
    if operator_name(node) == "mul" and any(isinstance(each, (int, float)) and each == 0 for each in node.args):
        return fill(builder, node, entry)
    return builder.channelwise(node, value, _applied(node, given[0]), activation=entry.activation_of(node))


def copied(builder: GraphBuilder, node: Node, entry: Operator) -> Any:
    """Rule of copies, possibly to another dtype or device."""
    builder.answer_for(node)  # only dtype and device of a second tensor are used
    value, kind = builder.tensor(node.args[0]), node.meta["val"].dtype
    return builder.channelwise(node, value, identity if kind.is_floating_point else partial(_as, kind))


def dropout(builder: GraphBuilder, node: Node, entry: Operator) -> Any:
    """Rule of dropout, which is the identity in evaluation."""
    return builder.channelwise(node, builder.tensor(node.args[0]), None if argument(node, 2, False) else identity)


def spatial(builder: GraphBuilder, node: Node, entry: Operator) -> Any:
    """Rule of operators over space within each channel: pooling, resampling."""
    value = builder.tensor(node.args[0])
    rank = re.search(r"([123])d", operator_name(node))
    # With fewer dimensions, the operator would treat channels as space.
    if rank is not None and len(value.shape) != int(rank[1]) + 2:
        raise Opaque("mixes them")
    value.along(1)
    return builder.channelwise(node, value, identity if entry.keeps_constants else None)


def along_space(builder: GraphBuilder, node: Node, entry: Operator) -> Any:
    """Rule of operators along a dimension other than the channels: softmax, cumsum."""
    value, dim = builder.tensor(node.args[0]), argument(node, 1)
    if not isinstance(dim, int) or builder.differ_along(value, dim % len(value.shape)):
        raise Opaque("mixes them")
    return builder.channelwise(node, value, None, keeps_zero=entry.at_zero == 0)


def fill(builder: GraphBuilder, node: Node, entry: Operator) -> Any:
    """Rule of constants in the shape of a tensor, whose channels follow those of the tensor."""
    source = next(place for place, given in enumerate(node.args) if isinstance(given, Node))
    atoms = builder.table.follow(builder.tensor(node.args[source]).atoms)
    builder.graph.ops.append(ChannelwiseOp(np.full_like(atoms, PAD), atoms, _applied(node, source)))
    return Value(tuple(node.meta["val"].shape), atoms)


def constant(builder: GraphBuilder, node: Node, entry: Operator) -> Any:
    """Rule of constants with a shape of their own. Zeros count as padding when they are concatenated to channels."""
    builder.answer_for(node)  # only dtype and device of a tensor are used
    shape = tuple(node.meta["val"].shape)
    if operator_name(node) in ("zeros", "new_zeros"):
        return Value(shape, np.full((1,) * len(shape), PAD))
    return builder.constant_value(shape)


# --- rules: two tensors -----------------------------------------------------------------------------------------------


def _two_tensors(builder: GraphBuilder, node: Node) -> Any:
    """Combine two tensors elementwise, with broadcasting, and tie their channels."""
    given = [place for place, each in enumerate(node.args) if isinstance(each, Node)]
    left, right = (_padded(builder.tensor(node.args[place]), node.meta["val"].ndim) for place in given)
    name = operator_name(node)
    if name == "div" and not node.kwargs:
        # x / y is zero if x is, regardless of y.
        inverse = Value(right.shape, builder.mapped(right.atoms, torch.reciprocal, keeps_zero=False))
        return builder.combined(node, left, inverse, operator.mul, absorbs_zero=True)
    evaluate = _applied(node, *given)
    return builder.combined(node, left, right, evaluate, absorbs_zero=name in PRODUCTS, adds=name in SUMS)


def choice(builder: GraphBuilder, node: Node, entry: Operator) -> Any:
    """Rule of where and masked_fill. The result is constant if both values are the same constant."""
    condition, *given = node.args if operator_name(node) == "where" else [node.args[i] for i in (1, 0, 2)]
    if len(given) != 2:
        raise Opaque("is used in an unusual way")
    shape = tuple(node.meta["val"].shape)
    where, *values = [
        _padded(builder.tensor(each), len(shape)) for each in (condition, *given) if isinstance(each, Node)
    ]
    # The condition shares channels with the result, but not values.
    unread = builder.mapped(where.atoms, None, keeps_zero=False)
    if not values:  # where(condition, 1.0, 0.0)
        return Value(shape, unread)
    if len(values) == 2:
        chosen = builder.combined(node, values[0], values[1], equal)
    else:
        number: Any = next(each for each in given if not isinstance(each, Node))
        chosen = Value(shape, builder.mapped(values[0].atoms, lambda constants: equal(constants, number)))
    outputs = builder.bound(node, where, chosen)
    source = np.ascontiguousarray(np.broadcast_to(chosen.atoms, outputs.shape))
    builder.graph.ops.append(ChannelwiseOp(source, outputs, identity))
    return Value(shape, outputs)


def _applied(node: Node, *positions: int) -> Evaluate:
    """Return a function that applies the node's operator to constants in place of the tensors at these positions."""
    if len(positions) != sum(isinstance(each, Node) for each in (*node.args, *node.kwargs.values())):
        raise Opaque("reads further tensors")
    kinds = [node.args[position].meta["val"].dtype for position in positions]  # type: ignore[union-attr]

    def evaluate(*constants: Tensor) -> Tensor:
        args = list(node.args)
        for position, kind, values in zip(positions, kinds, constants, strict=True):
            args[position] = _as(kind, values.clone())  # type: ignore[call-overload]
        return _as(node.meta["val"].dtype, node.target(*args, **node.kwargs))  # type: ignore[operator]

    return evaluate


def _as(kind: torch.dtype, constants: Tensor) -> Tensor:
    """Cast constants to integer and boolean dtypes, whose arithmetic differs; leave them in float64 otherwise."""
    return constants if kind.is_floating_point else constants.to(kind)


def _padded(value: Value, rank: int) -> Value:
    missing = rank - len(value.shape)
    return Value((1,) * missing + value.shape, value.atoms.reshape((1,) * missing + value.atoms.shape))


# --- rules: layers ----------------------------------------------------------------------------------------------------


def convolution(builder: GraphBuilder, node: Node, entry: Operator) -> Value:
    """Rule of convolutions: each output channel reads all input channels of its group."""
    transposed = operator_name(node).startswith("conv_transpose")
    weight: Any = node.args[1]
    bias, groups = argument(node, 2), argument(node, 6, 1)
    value = builder.tensor(node.args[0])
    inputs = value.along(1)
    shape, weight_shape = node.meta["val"].shape, weight.meta["val"].shape
    if len(shape) != len(weight_shape):
        raise Opaque("reads them along another dimension")
    # The weights of a transposed convolution are used once per input position.
    moved = value.shape if transposed else shape
    output = builder.fresh_value(node, 1)
    kernel, positions = weight_shape[2:], builder.positions(math.prod(moved[2:]) * moved[0])
    # In a transposed convolution, some output positions use fewer weights, so constants do not stay constant.
    padded = transposed or not _is_unpadded(argument(node, 4, 0), kernel)
    kind = "conv_transpose" if transposed else "conv"
    layer = LayerOp(builder.module_name(node), kind, groups, math.prod(kernel), padded, selectable=True)
    use = Use(inputs, output.atoms.ravel(), positions, builder.positions(math.prod(shape[2:]) * shape[0]))
    if not builder.add_layer(node, weight, bias, use, layer):
        raise Opaque("has a weight that is not a parameter of its module")
    if groups > 1 and len(inputs) == groups and shape[1] > groups:
        # Depthwise with a multiplier: the outputs of an input channel are removed together.
        grouped = output.atoms.reshape(groups, -1)
        builder.table.union(grouped[:, :1], grouped)
    return output


def _is_unpadded(padding: Any, kernel: Any) -> bool:
    if isinstance(padding, str):  # "same" pads what the kernel reaches beyond its own position
        return padding == "valid" or math.prod(kernel) == 1
    return not any(padding) if isinstance(padding, (list, tuple)) else not padding


_NO_LAYER = "multiplies them with a matrix outside a layer; nn.Linear can be cut"


def linear(builder: GraphBuilder, node: Node, entry: Operator) -> Value:
    """Rule of linear layers: each output channel reads all input channels, in the last dimension."""
    weight: Any = node.args[1]
    value, shape = builder.tensor(node.args[0]), node.meta["val"].shape
    inputs = value.along(len(value.shape) - 1)
    output = builder.fresh_value(node, len(shape) - 1)
    positions = builder.positions(math.prod(shape[:-1]))
    use = Use(inputs, output.atoms.ravel(), positions, positions)

    # A Select gathers along dimension 1.
    layer = LayerOp(builder.module_name(node), "linear", 1, 1, padded=False, selectable=len(value.shape) == 2)
    if not builder.add_layer(node, weight, argument(node, 2), use, layer):
        attention = isinstance(builder.module_of(node), nn.MultiheadAttention)
        raise Opaque("belongs to an attention module that checks their number" if attention else _NO_LAYER)
    return output


def norm(builder: GraphBuilder, node: Node, entry: Operator) -> Value:
    """Rule of BatchNorm and InstanceNorm, which normalise each channel separately."""
    parameters = node.args[1:5]
    own = is_known_norm(type(builder.module_of(node))) or any(given is not None for given in parameters)
    if operator_name(node) == "instance_norm" and not own:
        return spatial(builder, node, entry)
    inputs = builder.tensor(node.args[0]).along(1)
    output = builder.fresh_value(node, 1)
    weight, bias, running_mean, _ = parameters
    use = Use(inputs, output.atoms.ravel(), 0)
    if not builder.add_norm(node, weight if weight is not None else running_mean, bias, use):  # type: ignore[arg-type]
        raise Opaque("does not use the parameters of a known module")
    return output


def prelu(builder: GraphBuilder, node: Node, entry: Operator) -> Any:
    """Rule of PReLU, which multiplies negative values by a learned slope."""
    value, slope = builder.tensor(node.args[0]), builder.tensor(node.args[1])
    inputs = value.along(1)
    if slope.shape[:1] == (len(inputs),):
        builder.table.union(slope.atoms.ravel(), inputs)
    else:
        builder.table.pin(slope.atoms, f"it is the slope of all channels in {builder.place(node)}")
    return builder.channelwise(node, value, None, activation="prelu")


# --- rules: reductions -----------------------------------------------------------------------------------


def reduction(builder: GraphBuilder, node: Node, entry: Operator) -> Any:
    """Rule of reductions over dimensions: sum, mean, max."""
    if isinstance(argument(node, 1), Node):  # torch.max(x, y)
        return pointwise(builder, node, entry)
    name, value = operator_name(node), builder.tensor(node.args[0])
    example, rank = node.meta["val"], len(value.shape)
    given = argument(node, 2 if name == "linalg_vector_norm" else 1)
    dims = [*range(rank)] if given in (None, []) else list(given) if isinstance(given, (list, tuple)) else [given]
    if any(type(dim) is not int for dim in dims):  # var(x, unbiased)
        raise Opaque("is used in an unusual way")
    dims = [dim % rank for dim in dims]
    varying = [dim for dim in dims if value.varies_along(dim)]
    if any(builder.differ_along(value, dim) for dim in varying):
        raise Opaque("combines channels, so that none of them can be removed")
    head = value.atoms
    if name == "sum":  # a sum over tied groups (the radix of ResNeSt) leaves one channel per class
        head, varying = _added_up(builder, head, varying), []
    for dim in dims:
        head = head.take([0], axis=dim)
    shape = (example[0] if isinstance(example, (list, tuple)) else example).shape
    if len(shape) < rank:  # without keepdim
        head = head.reshape([size for dim, size in enumerate(head.shape) if dim not in dims])
    evaluate = identity if entry.keeps_constants and not varying else None
    return builder.channelwise(node, Value(tuple(shape), head), evaluate, entry.at_zero == 0 and not varying)


def _added_up(builder: GraphBuilder, atoms: IntArray, dims: Sequence[int]) -> IntArray:
    """Return the channels that result from adding those along `dims`; zero if all of them are zero."""
    for dim in dims:
        total, *others = np.split(atoms, atoms.shape[dim], axis=dim)
        for other in others:
            outputs = builder.table.follow(total)
            builder.graph.ops.append(
                BinaryOp(total.ravel(), other.ravel(), outputs.ravel(), operator.add, absorbs_zero=False, adds=True)
            )
            total = outputs
        atoms = total
    return atoms


# --- the table --------------------------------------------------------------------------------------------------------

OPERATORS: dict[str, Operator] = {}
"""Maps operator names, as returned by :func:`softprune.graph.builder.operator_name`, to their entries."""


def _add(rule: Callable[..., Any], *names: str, **properties: Any) -> None:
    OPERATORS.update({name: Operator(rule, **properties) for name in names})


_BOTH_TAILS_LIVE = Activation()
_SELU_SLOPE = 1.0507009873554805 * 1.6732632423543772  # scale * alpha, the slope at zero from below

# fmt: off
# --- one value at a time ----------------------------------------------------------------------------------------------
_add(pointwise, "relu", "relu6", activation=Activation(left_tail_dies=True))
for _name, _dips in {
    "hardswish": lambda x: x * min(max(x + 3.0, 0.0), 6.0) / 6.0,
    "silu": lambda x: x / (1.0 + math.exp(-x)),
    "gelu": lambda x: 0.5 * x * math.erfc(-x / math.sqrt(2.0)),
    "mish": lambda x: x * math.tanh(math.log1p(math.exp(x))),
}.items():
    _add(pointwise, _name, activation=Activation(left_tail_dies=True, dips=_dips))
_add(
    pointwise, "leaky_relu", "rrelu", "elu", "hardtanh", "clamp", "clamp_min",
    activation=_BOTH_TAILS_LIVE, by_values=True,
)
_add(pointwise, "celu", "tanh", "softsign", "tanhshrink", "softshrink", "hardshrink", activation=_BOTH_TAILS_LIVE)
_add(pointwise, "selu", activation=Activation(steepest_slope=_SELU_SLOPE))
_add(prelu, "prelu", activation=_BOTH_TAILS_LIVE)
_add(pointwise, "sigmoid", "hardsigmoid", at_zero=0.5)
_add(pointwise, "softplus", at_zero=0.69)
_add(pointwise, "log_sigmoid", at_zero=-0.69)
_add(pointwise, "exp", "exp2", "cos", "cosh", "logical_not", at_zero=1.0)
_add(pointwise, "log", "log2", "log10", at_zero=-math.inf)
_add(
    pointwise, "abs", "neg", "expm1", "log1p", "sqrt", "rsqrt", "reciprocal", "square", "pow", "clamp_max",
    "threshold", "floor", "ceil", "round", "trunc", "frac", "sign", "sin", "sinh", "tan", "atan", "asinh", "erf",
    "nan_to_num", "isnan", "isinf",
)
_add(copied, "clone", "to", "_to_copy", "alias", "detach", "lift_fresh_copy", transparent=True)
_add(
    dropout, "dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "native_dropout", transparent=True
)
_add(fill, "zeros_like", "ones_like", "full_like")
_add(constant, "zeros", "new_zeros", "new_ones", "new_full", "new_empty")
# --- two values -------------------------------------------------------------------------------------------------------
_add(
    pointwise, "add", "sub", "rsub", "mul", "div", "maximum", "minimum", "lerp", "remainder", "fmod",
    "floor_divide", "atan2", "max_unpool2d", "max_unpool3d", "gt", "ge", "lt", "le", "eq", "ne", "logical_and",
    "logical_or", "logical_xor", "__and__", "__or__", "bitwise_and", "bitwise_or",
)
_add(choice, "where", "masked_fill")
# --- within each channel, over space ----------------------------------------------------------------------------------
for _rank in ("1d", "2d", "3d"):
    _add(
        spatial, f"max_pool{_rank}", f"max_pool{_rank}_with_indices", f"adaptive_max_pool{_rank}",
        f"adaptive_avg_pool{_rank}", f"upsample_nearest{_rank}", f"reflection_pad{_rank}",
        f"replication_pad{_rank}", keeps_constants=True, transparent=True,
    )
    _add(spatial, f"avg_pool{_rank}", f"_upsample_nearest_exact{_rank}", f"lp_pool{_rank}", transparent=True)
_add(
    spatial, "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
    "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "grid_sampler", "grid_sampler_2d", "grid_sampler_3d",
    "fractional_max_pool2d", "fractional_max_pool3d", transparent=True,
)
_add(along_space, "softmax", "log_softmax", at_zero=math.nan)
_add(along_space, "cumsum", "sort")
# --- channels together ------------------------------------------------------------------------------------------------
_add(reduction, "mean", "amax", "amin", "max", "min", keeps_constants=True)
_add(reduction, "sum", "var", "prod", "linalg_vector_norm")
_add(reduction, "logsumexp", "std", "argmax", "argmin", at_zero=math.nan)  # the gradient of std at zero is infinite
_add(convolution, "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
_add(linear, "linear")
_add(norm, "batch_norm", "instance_norm")
# --- movements of data ------------------------------------------------------------------------------------------------
_add(movements.view, "view", "reshape", "_unsafe_view", "flatten", "unflatten", "ravel", transparent=True)
_add(movements.expansion, "expand")
_add(movements.movement, "permute", "transpose", "t", "contiguous", "unsqueeze", "flip", transparent=True)
_add(movements.movement, "repeat", "repeat_interleave", "pixel_unshuffle")
_add(movements.squeeze, "squeeze", transparent=True)
_add(movements.pixel_shuffle, "pixel_shuffle")
_add(movements.split, "chunk", "split", "split_with_sizes", "tensor_split", transparent=True)
_add(movements.movement, "getitem", transparent=True)  # handled in tracing.py; listed because it is transparent
_add(movements.piece, "slice", transparent=True)
_add(movements.positions, "select", "unbind", "roll", "rot90", "unfold")
_add(movements.indexing, "index", "index_select", transparent=True)
_add(movements.concatenation, "cat", transparent=True)
_add(movements.concatenation, "stack")
_add(movements.padding, "pad", "constant_pad_nd", transparent=True)
# fmt: on


def add_operator(name: str, entry: Operator) -> None:
    """Add a custom operator (``torch.library``) to the table, so that the channels around it can be cut.

    Args:
        name: ``"mine::act"``, or as shown by `inspect`, ``"mine.act.default"``.
        entry: Its entry, such as ``Operator(pointwise, activation=Activation(left_tail_dies=True))``, with one of the
            rules of :mod:`softprune.graph`.
    """
    space, name, *_ = [*re.split(r"::|\.", name), ""]
    if not space or not name:
        raise ConfigError(f"The name of an operator must be namespace::name. Got {space!r}; write 'mine::{space}'.")
    if not callable(entry.rule):
        raise ConfigError(
            f"The rule of an operator must be a function. Got {entry.rule!r}; use one of softprune.graph, such as "
            "pointwise."
        )
    OPERATORS[qualified(space, name)] = entry


def activations() -> dict[str, Activation]:
    """Return all activations, which map zero to zero, by name of their operator."""
    return {name: entry.activation for name, entry in OPERATORS.items() if entry.activation is not None}


def find_activation(name: str) -> Activation | None:
    """Return the activation with a name returned by :meth:`Operator.activation_of`; None if unknown."""
    base, _, slope = name.partition("*")
    entry = OPERATORS.get(base)
    known = None if entry is None else entry.activation
    return replace(known, steepest_slope=float(slope)) if known and slope else known
