"""Rules for operators that bring channels together: layers with weights, reductions, products of matrices."""

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn
from torch.fx import Node

from softprune.graph.builder import GraphBuilder, Opaque, Operator, Value, argument, operator_name
from softprune.graph.channels import IntArray
from softprune.graph.elementwise import channelwise, combined, pointwise, spatial
from softprune.graph.modules import is_known_norm
from softprune.graph.ops import BinaryOp, ChannelwiseOp, ExtraMacs, FreeParameter, LayerOp, OpaqueOp, Use, identity

# --- layers --------------------------------------------------------------------------------------------------------


def convolution(builder: GraphBuilder, node: Node, entry: Operator) -> Value:
    """Read every input channel of its group in every output channel."""
    transposed = operator_name(node).startswith("conv_transpose")
    weight: Any = node.args[1]
    bias, groups = argument(node, 2), argument(node, 6, 1)
    value = builder.tensor(node.args[0])
    inputs = value.along(1)
    shape, weight_shape = node.meta["val"].shape, weight.meta["val"].shape
    if len(shape) != len(weight_shape):
        raise Opaque("reads them along another dimension")
    # A transposed convolution's weights act once per input position.
    moved = value.shape if transposed else shape
    count = math.prod(moved[2:]) * moved[0]
    output = builder.fresh_value(node, 1)
    kernel, positions = weight_shape[2:], builder.positions(count)
    # A transposed convolution leaves positions that fewer weights reach: its constants are no constants.
    padded = transposed or not _is_unpadded(argument(node, 4, 0), kernel)

    def build(name: str) -> LayerOp:
        kind = "conv_transpose" if transposed else "conv"
        return LayerOp(name, kind, groups, math.prod(kernel), padded, selectable=True)

    if builder.add_layer(node, weight, bias, Use(inputs, output.atoms.ravel(), positions), build):
        if groups > 1 and len(inputs) == groups and shape[1] > groups:
            # Depthwise with a multiplier: the outputs of one input go together.
            grouped = output.atoms.reshape(groups, -1)
            builder.table.union(grouped[:, :1], grouped)
        return output
    one_for_all = bool(weight.args) and operator_name(weight) in ("expand", "expand_as", "repeat")
    if bias is not None or not one_for_all or transposed or not groups == len(inputs) == shape[1] > 1:
        raise Opaque("has a weight that is not a module's own parameter")
    # Every channel by itself, with one kernel for all of them: a blur.
    output = builder.followed_value(node, value.atoms)
    builder.ops.append(ChannelwiseOp(value.atoms, output.atoms, evaluate=None))
    folded = builder.positions(count * groups) < positions * groups  # the groups contain the batch
    channels = value.atoms.ravel()
    builder.extra_macs.append(ExtraMacs(np.unique(channels) if folded else channels, positions * math.prod(kernel)))
    builder.add_unproven_size(node, value.atoms)  # the number of groups, and of kernels, may be a literal
    return output


def _is_unpadded(padding: Any, kernel: Any) -> bool:
    if isinstance(padding, str):  # "same" pads what the kernel reaches beyond its own position
        return padding == "valid" or math.prod(kernel) == 1
    return not any(padding) if isinstance(padding, (list, tuple)) else not padding


def deformable(builder: GraphBuilder, node: Node, entry: Operator) -> Any:
    """Lose the columns of the weight for channels that go; the outputs stay."""
    inputs = builder.tensor(node.args[0]).along(1)
    if node.args[11:13] != (1, 1):
        raise Opaque("has groups")
    builder.table.union(builder.tensor(node.args[1], 1).atoms.ravel(), inputs)
    output = builder.pinned_value(node.meta["val"].shape, builder.reason(node, "gives them"))
    builder.ops.append(OpaqueOp((inputs,), output.atoms.ravel(), skips_zeros=True))
    return output


def linear(builder: GraphBuilder, node: Node, entry: Operator) -> Value:
    """Read every input channel, of the last dimension, in every output channel."""
    weight: Any = node.args[1]
    value, shape = builder.tensor(node.args[0]), node.meta["val"].shape
    inputs = value.along(len(value.shape) - 1)
    output = builder.fresh_value(node, len(shape) - 1)
    use = Use(inputs, output.atoms.ravel(), builder.positions(math.prod(shape[:-1])))

    def build(name: str) -> LayerOp:
        # A Select picks along dimension 1.
        return LayerOp(name, "linear", 1, 1, padded=False, selectable=len(value.shape) == 2)

    if builder.add_layer(node, weight, argument(node, 2), use, build):
        return output
    if isinstance(builder.module_of(node), nn.MultiheadAttention):
        raise Opaque("belongs to an attention that checks their number")
    return product(builder, node, entry)


def norm(builder: GraphBuilder, node: Node, entry: Operator) -> Value:
    """Normalise each channel with parameters of its own: BatchNorm and InstanceNorm."""
    parameters = node.args[1:5]
    own = is_known_norm(type(builder.module_of(node))) or any(given is not None for given in parameters)
    if operator_name(node) == "instance_norm" and not own:
        return spatial(builder, node, entry)
    inputs = builder.tensor(node.args[0]).along(1)
    output = builder.fresh_value(node, 1)
    weight, bias, running_mean, _ = parameters
    use = Use(inputs, output.atoms.ravel(), 0)
    if not builder.add_norm(node, weight if weight is not None else running_mean, bias, use):  # type: ignore[arg-type]
        raise Opaque("does not use one known module's own parameters")
    return output


def prelu(builder: GraphBuilder, node: Node, entry: Operator) -> Any:
    """Multiply negative values with a learned slope."""
    value, slope = builder.tensor(node.args[0]), builder.tensor(node.args[1])
    inputs = value.along(1)
    if slope.shape[:1] == (len(inputs),):
        builder.table.union(slope.atoms.ravel(), inputs)
    else:
        builder.table.pin(slope.atoms, f"one of them is the slope of all channels in {builder.place(node)}")
    name = node.args[1].meta.get("tensor")  # type: ignore[union-attr]
    builder.slopes += [] if name is None else [(name, value.atoms)]
    return channelwise(builder, node, value, None, activation="prelu")


def recurrent(builder: GraphBuilder, node: Node, entry: Operator) -> Any:
    """Read channels with the first weights of an LSTM, GRU or RNN; the outputs stay."""
    value, module, name = builder.tensor(node.args[0]), builder.module_of(node), builder.module_name(node)
    inputs = value.along(len(value.shape) - 1)
    weights = node.args[2]
    known = type(module) in (nn.LSTM, nn.GRU, nn.RNN) and isinstance(weights, (list, tuple))
    own = {id(parameter) for parameter in module.parameters()}
    others = (each for each in builder.modules.values() if each is not module)
    if not known or any(id(parameter) in own for other in others for parameter in other.parameters(recurse=False)):
        raise Opaque("is not one module's own")
    reading = {key: each for key, each in module.named_parameters(name) if ".weight_ih_l0" in f".{key}"}
    for key in reading:
        if key in builder.free_parameters:  # called again
            builder.table.union(builder.free_parameters[key].atoms, inputs)
        else:
            builder.free_parameters[key] = FreeParameter(key, 1, builder.table.follow(inputs))
    positions = builder.positions(math.prod(value.shape[:-1]))
    rows = sum(len(parameter) for parameter in reading.values())
    builder.extra_macs.append(ExtraMacs(inputs, positions * rows))
    builder.asked.update(weights)  # type: ignore[arg-type]  # what gives the first state keeps its width
    outputs = [builder.pinned_value(each.shape, builder.reason(node, "gives them")) for each in node.meta["val"]]
    all_weights = sum(parameter.numel() for parameter in module.parameters() if parameter.dim() == 2)
    rest = positions * (all_weights - rows * len(inputs))
    builder.extra_macs.append(ExtraMacs(outputs[0].atoms.ravel()[:1], rest))
    for output in outputs:
        builder.ops.append(OpaqueOp((inputs,), output.atoms.ravel(), skips_zeros=True))
    return outputs


# --- reductions and products ---------------------------------------------------------------------------------------


def reduction(builder: GraphBuilder, node: Node, entry: Operator) -> Any:
    """Reduce some dimensions to one value: sums, means, the largest values."""
    if isinstance(argument(node, 1), Node):  # torch.max(x, y)
        return pointwise(builder, node, entry)
    name, value = operator_name(node), builder.tensor(node.args[0])
    rank, is_norm = len(value.shape), name == "linalg_vector_norm"
    given = argument(node, 2 if is_norm else 1)
    dims = [*range(rank)] if given in (None, []) else list(given) if isinstance(given, (list, tuple)) else [given]
    if any(type(dim) is not int for dim in dims):  # var(x, unbiased)
        raise Opaque("is used in an unusual way")
    # A norm of negative order is about the smallest values, which zeros are.
    skips_zeros = name == "sum" or (is_norm and argument(node, 1, 2) >= 0)
    return _reduced(builder, node, value, [dim % rank for dim in dims], entry, skips_zeros, adds=name == "sum")


def _reduced(
    builder: GraphBuilder,
    node: Node,
    value: Value,
    dims: Sequence[int],
    entry: Operator,
    skips_zeros: bool,
    *,
    adds: bool,
) -> Any:
    """Reduce `dims` of `value`. `skips_zeros`: zeros among its inputs change nothing. `adds`: it is a sum."""
    example, rank = node.meta["val"], len(value.shape)
    shape = (example[0] if isinstance(example, (list, tuple)) else example).shape
    varying = [dim for dim in dims if value.varies_along(dim)]
    # A sum over tied groups (radix of ResNeSt, say) leaves one channel per class.
    if any(builder.differ_along(value, dim) for dim in varying):
        if not skips_zeros or any(builder.differ_along(value, dim) for dim in range(rank) if dim not in dims):
            raise Opaque("combines channels, so that none of them can be removed")
        output = builder.pinned_value(shape, builder.reason(node, "adds them up"))
        builder.ops.append(OpaqueOp((value.atoms.ravel(),), output.atoms.ravel(), skips_zeros=True))
        return output
    head = value.atoms
    if adds:
        head, varying = _added_up(builder, head, varying), []
    for dim in dims:
        head = head.take([0], axis=dim)
    if len(shape) < rank:  # without keepdim
        head = head.reshape([size for dim, size in enumerate(head.shape) if dim not in dims])
    evaluate = identity if entry.keeps_constants and not varying else None
    return channelwise(builder, node, Value(tuple(shape), head), evaluate, entry.at_zero == 0 and not varying)


def _added_up(builder: GraphBuilder, atoms: IntArray, dims: Sequence[int]) -> IntArray:
    """Return the channels left when those along `dims` are added to each other: zero where all of them are."""
    for dim in dims:
        total, *others = np.split(atoms, atoms.shape[dim], axis=dim)
        for other in others:
            outputs = builder.table.follow(total)
            builder.ops.append(
                BinaryOp(total.ravel(), other.ravel(), outputs.ravel(), operator.add, absorbs_zero=False, adds=True)
            )
            total = outputs
        atoms = total
    return atoms


def product(builder: GraphBuilder, node: Node, entry: Operator) -> Any:
    """Add up products of pairs of values: matmul and its kin as an einsum of two tensors."""
    tensors, terms, output = _equation(node)
    counted = _is_counted(builder, node, tensors)
    if counted is None:
        raise Opaque("multiplies them with a matrix that is no parameter")
    labels = list(dict.fromkeys([*output, *terms[0], *terms[1]]))
    # A parameter comes last: where channels are added up, it is cut along the same dimension.
    (first, one), (second, other) = sorted(
        zip(tensors, terms, strict=True), key=lambda pair: isinstance(builder.values.get(pair[0]), Node)
    )
    value = builder.tensor(first)
    read = [label for dim, label in enumerate(one) if value.varies_along(dim) and label in other]
    summed = [label for label in read if label not in output]
    left = _laid_out(value, one, labels)
    right = _laid_out(builder.tensor(second, other.index(summed[0]) if summed else None), other, labels)
    along = [{dim for dim in range(len(labels)) if each.varies_along(dim)} for each in (left, right)]
    if along[0] - along[1] and along[1] - along[0]:
        raise Opaque("combines channels with each other, so that none of them can be removed")
    repeated = any(np.unique(atoms).size < atoms.size for atoms in (_untied(builder, left), _untied(builder, right)))
    if repeated and min(along[0] | along[1]) < len(output):
        raise Opaque("reads them and samples in one dimension")
    shape = np.broadcast_shapes(left.shape, right.shape)
    pairs = combined(builder, node, left, right, operator.mul, absorbs_zero=True, shape=shape)
    if counted:
        macs = builder.positions(math.prod(shape))
        builder.extra_macs.append(ExtraMacs(pairs.atoms.ravel(), macs // pairs.atoms.size))
    dims = range(len(output), len(labels))
    return _reduced(builder, node, pairs, dims, entry, skips_zeros=True, adds=True) if dims else pairs


def _equation(node: Node) -> tuple[list[Node], list[list[str]], list[str]]:
    """Return the two tensors that are multiplied, the labels of their dimensions, and those of the output's."""
    given: Any
    if operator_name(node) == "einsum":
        equation, given = str(node.args[0]).replace(" ", ""), node.args[1]
    else:
        given = node.args[:2]
        left, right = (each.meta["val"].ndim > 1 for each in given)
        columns = "jk" if operator_name(node) == "linear" else "...kj"
        equation = f"{'...ik' if left else 'k'},{columns if right else 'k'}->...{'i' * left}{'j' * right}"
    terms, arrow, result = equation.partition("->")
    if len(given) != 2 or terms.count(",") != 1:
        raise Opaque("multiplies other than two tensors")
    if not arrow:  # the labels that occur once, in the order of the alphabet
        once = sorted(label for label in terms if label.isalpha() and terms.count(label) == 1)
        result = "".join(["..."] * ("..." in terms) + once)
    one, other = terms.split(",")
    ranks = [tensor.meta["val"].ndim for tensor in (*given, node)]
    *labels, output = (_labels(*each) for each in zip((one, other, result), ranks, strict=True))
    return list(given), labels, output


def _labels(term: str, rank: int) -> list[str]:
    """Return one label per dimension; those of an ellipsis count from the last."""
    before, _, after = term.partition("...")
    labels = [*before, *map(str, range(rank - len(before) - len(after), 0, -1)), *after]
    if len(labels) != rank or len(set(labels)) < rank:
        raise Opaque("takes a diagonal")
    return labels


def _laid_out(value: Value, own: Sequence[str], labels: Sequence[str]) -> Value:
    """Return `value` with one dimension per label, of size 1 where it has none."""
    order = [own.index(label) for label in labels if label in own]
    missing = tuple(place for place, label in enumerate(labels) if label not in own)
    shape = [value.shape[own.index(label)] if label in own else 1 for label in labels]
    return Value(tuple(shape), np.expand_dims(value.atoms.transpose(order), missing))


def _untied(builder: GraphBuilder, value: Value) -> IntArray:
    """Return the first of the atoms along dimensions where all are cut together: heads of attention and samples."""
    tied = [dim for dim in range(len(value.shape)) if not builder.differ_along(value, dim)]
    return value.atoms[tuple(slice(0, 1) if dim in tied else slice(None) for dim in range(len(value.shape)))]


def _is_counted(builder: GraphBuilder, node: Node, tensors: Sequence[Node]) -> bool | None:
    """Return whether torch makes one product of matrices of it, whose MACs count; None: strides decide."""
    left, right = (tensor.meta["val"] for tensor in tensors)
    if operator_name(node) in ("einsum", "bmm") or min(left.ndim, right.ndim) > 2 or max(left.ndim, right.ndim) < 2:
        return False
    small = tensors[left.ndim > 2]
    if isinstance(builder.tensors.get(small.meta.get("tensor", "")), nn.Parameter):
        return True
    if right.ndim <= 2:
        return True if left.ndim <= 2 or left.is_contiguous() else None
    return False if small.op == "placeholder" else None
