"""Rules for the operators with weights: convolutions, linear and recurrent layers, normalisation, PReLU."""

import math
from typing import Any

import numpy as np
from torch import nn
from torch.fx import Node

from softprune.graph.builder import GraphBuilder, Value
from softprune.graph.modules import is_known_norm
from softprune.graph.ops import ChannelwiseOp, ExtraMacs, FreeParameter, LayerOp, OpaqueOp, Use
from softprune.graph.rules.elementwise import spatial
from softprune.graph.rules.registry import OPERATORS, argument, operator_name, rule
from softprune.graph.rules.sums import product


def _is_unpadded(padding: Any, kernel: Any) -> bool:
    if isinstance(padding, str):  # "same" pads what the kernel reaches beyond its own position
        return padding == "valid" or math.prod(kernel) == 1
    return not any(padding) if isinstance(padding, (list, tuple)) else not padding


@rule("conv")
@rule("conv_transpose")
def convolution(builder: GraphBuilder, node: Node) -> Value:
    kind = OPERATORS[operator_name(node)].kind
    transposed = kind == "conv_transpose"
    weight: Any = node.args[1]
    bias, groups = argument(node, 2, "bias"), argument(node, 6, "groups", 1)
    value = builder.value(node.args[0])
    inputs = value.along(1) if isinstance(value, Value) else None
    shape, weight_shape = node.meta["val"].shape, weight.meta["val"].shape
    # A transposed convolution's weights act once per input position.
    moved = node.args[0].meta["val"].shape if transposed else shape  # type: ignore[union-attr]
    count = math.prod(moved[2:]) * moved[0]
    if inputs is None or len(shape) != len(weight_shape):
        return builder.opaque(node, f"the convolution in {builder.where(node)} reads them along another dimension")
    output = builder.fresh_value(node, 1)
    kernel, positions = weight_shape[2:], builder.positions(count)
    # A transposed convolution leaves positions that fewer weights reach: its constants are no constants.
    padded = transposed or not _is_unpadded(argument(node, 4, "padding", 0), kernel)

    def build(name: str) -> LayerOp:
        return LayerOp(name, kind, groups, math.prod(kernel), padded, selectable=True)

    use = Use(inputs, output.atoms.ravel(), positions)
    if builder.add_layer(node, weight, bias, build, use):
        if groups > 1 and len(inputs) == groups and shape[1] > groups:
            # Depthwise with a multiplier: the outputs of one input go together.
            grouped = output.atoms.reshape(groups, -1)
            builder.table.union(grouped[:, :1], grouped)
        return output
    one_for_all = operator_name(weight) in ("expand", "expand_as", "repeat") if weight.args else False
    if bias is None and one_for_all and groups == len(inputs) == shape[1] > 1 and not transposed:
        folded = builder.positions(count * groups) < positions * groups
        return _filter(builder, node, value, positions * math.prod(kernel), folded=folded)
    return builder.opaque(
        node, f"the weight of the convolution in {builder.where(node)} is not a module's own parameter"
    )


def _filter(builder: GraphBuilder, node: Node, value: Value, macs: int, *, folded: bool) -> Value:
    """Every channel by itself, with one kernel for all of them: a blur. `folded`: the groups contain the batch."""
    output = builder.followed_value(node, value.atoms)
    builder.ops.append(ChannelwiseOp(value.atoms, output.atoms, evaluate=None))
    channels = value.atoms.ravel()
    builder.extra_macs.append(ExtraMacs(np.unique(channels) if folded else channels, macs))
    builder.add_unproven_size(node, value.atoms)  # the number of groups, and of kernels, may be a literal
    return output


@rule("deform_conv")
def deformable_convolution(builder: GraphBuilder, node: Node) -> Any:
    """Its weight loses the columns of channels that go; its outputs stay."""
    value, groups = builder.value(node.args[0]), node.args[11:13]
    inputs = value.along(1) if isinstance(value, Value) else None
    if inputs is None or groups != (1, 1):
        return builder.opaque(node, f"{node.target} in {builder.where(node)} has groups, or reads them differently")
    builder.table.union(builder.value(node.args[1], 1).atoms.ravel(), inputs)
    output = builder.pinned_value(node.meta["val"].shape, f"{node.target} in {builder.where(node)} gives them")
    builder.ops.append(OpaqueOp((inputs,), output.atoms.ravel(), skips_zeros=True))
    return output


@rule("linear")
def linear(builder: GraphBuilder, node: Node) -> Value:
    weight: Any = node.args[1]
    bias = argument(node, 2, "bias")
    value = builder.value(node.args[0])
    shape = node.meta["val"].shape
    positions = builder.positions(math.prod(shape[:-1]))
    inputs = value.along(len(value.shape) - 1) if isinstance(value, Value) else None
    if inputs is None:
        return builder.opaque(node, f"the linear layer in {builder.where(node)} reads them along another dimension")
    output = builder.fresh_value(node, len(shape) - 1)

    def build(name: str) -> LayerOp:
        # A Select picks along dimension 1.
        return LayerOp(name, "linear", 1, 1, padded=False, selectable=len(value.shape) == 2)

    if builder.add_layer(node, weight, bias, build, Use(inputs, output.atoms.ravel(), positions)):
        return output
    place, name = builder.where(node), builder.provenance.module_of(node)[1]
    if isinstance(builder.provenance.module(name), nn.MultiheadAttention):
        return builder.opaque(node, f"the attention in {place} checks their number")
    return product(builder, node)


@rule("batch_norm")
def batch_norm(builder: GraphBuilder, node: Node) -> Value:
    source, weight, bias, running_mean = node.args[:4]
    value = builder.value(source)
    inputs = value.along(1) if isinstance(value, Value) else None
    if inputs is None:
        return builder.opaque(node, f"the BatchNorm in {builder.where(node)} reads them along another dimension")
    output = builder.fresh_value(node, 1)
    use = Use(inputs, output.atoms.ravel(), 0)
    if not builder.add_norm(node, weight if weight is not None else running_mean, bias, use):  # type: ignore[arg-type]
        return builder.opaque(
            node, f"the {operator_name(node)} in {builder.where(node)} does not use one known module's own parameters"
        )
    return output


@rule("instance_norm")
def instance_norm(builder: GraphBuilder, node: Node) -> Any:
    """Cut as a BatchNorm is, or each channel by itself where it is a function without parameters."""
    module = builder.provenance.module(builder.provenance.module_of(node)[1])
    if is_known_norm(type(module)) or any(given is not None for given in node.args[1:5]):
        return batch_norm(builder, node)
    return spatial(builder, node)


@rule("prelu")
def prelu(builder: GraphBuilder, node: Node) -> Any:
    value, slope = builder.value(node.args[0]), builder.value(node.args[1])
    inputs = value.along(1) if isinstance(value, Value) and isinstance(slope, Value) else None
    if inputs is None:
        return builder.opaque(node, f"the PReLU in {builder.where(node)} reads them along another dimension")
    if slope.shape[0] == len(inputs):
        builder.table.union(slope.atoms.ravel(), inputs)
    else:
        builder.table.pin(slope.atoms, f"one of them is the slope of all channels in {builder.where(node)}")
    output = builder.followed_value(node, value.atoms)
    builder.ops.append(ChannelwiseOp(value.atoms, output.atoms, evaluate=None, activation="prelu"))
    name = builder.provenance.parameter_name(node.args[1])
    if name is not None and builder.provenance.has_tensor(name):
        builder.slopes.append((name, value.atoms))
    return output


@rule("recurrent")
def recurrent(builder: GraphBuilder, node: Node) -> Any:
    """An LSTM, GRU or RNN: its first weights read the input's channels, and its outputs stay."""
    value = builder.value(node.args[0])
    weights: Any = node.args[2]
    inputs = value.along(len(value.shape) - 1) if isinstance(value, Value) else None
    place, name = builder.where(node), builder.provenance.module_of(node)[1]
    known = type(builder.provenance.module(name)) in (nn.LSTM, nn.GRU, nn.RNN) and isinstance(weights, (list, tuple))
    if inputs is None or not known or not builder.provenance.is_only_owner(name):
        return builder.opaque(node, f"{node.target} in {place} is not one module's own, or reads them differently")
    reading = {
        f"{name}.{attribute}": parameter
        for attribute, parameter in builder.provenance.module(name).named_parameters()
        if attribute.startswith("weight_ih_l0")
    }
    for parameter in reading:
        if parameter in builder.free_parameters:  # called again
            builder.table.union(builder.free_parameters[parameter].atoms, inputs)
        else:
            builder.free_parameters[parameter] = FreeParameter(parameter, 1, builder.table.follow(inputs))
    positions = builder.positions(math.prod(value.shape[:-1]))
    rows = sum(len(parameter) for parameter in reading.values())
    builder.extra_macs.append(ExtraMacs(inputs, positions * rows))
    builder.asked.update(weights)  # what gives the first state keeps its width
    outputs = [builder.pinned_value(each.shape, f"{node.target} in {place} gives them") for each in node.meta["val"]]
    matrices = [parameter for parameter in builder.provenance.module(name).parameters() if parameter.dim() == 2]
    others = sum(matrix.numel() for matrix in matrices) - rows * len(inputs)
    builder.extra_macs.append(ExtraMacs(outputs[0].atoms.ravel()[:1], positions * others))
    for output in outputs:
        builder.ops.append(OpaqueOp((inputs,), output.atoms.ravel(), skips_zeros=True))
    return outputs
