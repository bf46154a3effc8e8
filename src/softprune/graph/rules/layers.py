"""Rules for the operators with weights: convolutions, linear layers, BatchNorm, PReLU."""

from __future__ import annotations

import math
from typing import Any

from torch.fx import Node

from softprune.graph.builder import GraphBuilder, Value, argument, operator_name, rule
from softprune.graph.ops import ExtraMacs, LayerOp, Map, Use


def _is_unpadded(padding: Any, kernel: Any) -> bool:
    if isinstance(padding, str):  # "same" pads what the kernel reaches beyond its own position
        return padding == "valid" or math.prod(kernel) == 1
    return not any(padding) if isinstance(padding, (list, tuple)) else not padding


@rule("conv1d", "conv2d", "conv3d")
def convolution(linker: GraphBuilder, node: Node) -> Value:
    return _convolve(linker, node, transposed=False, groups=argument(node, 6, "groups", 1))


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def transposed_convolution(linker: GraphBuilder, node: Node) -> Value:
    return _convolve(linker, node, transposed=True, groups=argument(node, 6, "groups", 1))


def _convolve(linker: GraphBuilder, node: Node, *, transposed: bool, groups: int) -> Value:
    weight: Any = node.args[1]
    bias = argument(node, 2, "bias")
    value = linker.value(node.args[0])
    inputs = value.along(1) if isinstance(value, Value) else None
    shape, weight_shape = node.meta["val"].shape, weight.meta["val"].shape
    # A transposed convolution's weights act once per input position.
    moved = node.args[0].meta["val"].shape if transposed else shape  # type: ignore[union-attr]
    positions = linker.positions(math.prod(moved[2:]) * moved[0])
    if inputs is None or len(shape) != len(weight_shape):
        return _opaque(linker, node, positions, "the convolution in {} reads them along another dimension")
    output = linker.fresh_value(node, 1)
    kernel = weight_shape[2:]
    # A transposed convolution leaves positions that fewer weights reach: its constants are no constants.
    padded = transposed or not _is_unpadded(argument(node, 4, "padding", 0), kernel)

    def build(name: str) -> LayerOp:
        kind = "conv_transpose" if transposed else "conv"
        return LayerOp(name, kind, groups, math.prod(kernel), padded, selectable=True)

    use = Use(inputs, output.atoms.ravel(), positions)
    if linker.add_mix(node, weight, bias, build, use):
        if groups > 1 and len(inputs) == groups and shape[1] > groups:
            # Depthwise with a multiplier: the outputs of one input go together.
            grouped = output.atoms.reshape(groups, -1)
            linker.table.union(grouped[:, :1], grouped)
        return output
    one_for_all = operator_name(weight) in ("expand", "expand_as", "repeat") if weight.args else False
    if bias is None and one_for_all and groups == len(inputs) == shape[1] > 1 and not transposed:
        return _filter(linker, node, value, positions * math.prod(kernel))
    return _opaque(
        linker, node, positions, "the weight of the convolution in {} is not a module's own parameter"
    )


def _filter(linker: GraphBuilder, node: Node, value: Value, macs: int) -> Value:
    """Every channel by itself, with one kernel for all of them: a blur."""
    output = linker.followed_value(node, value.atoms)
    linker.records.append(Map(value.atoms, output.atoms, evaluate=None))
    linker.charges.append(ExtraMacs(value.atoms.ravel(), macs))
    linker.suspect(node, value.atoms)  # the number of groups, and of kernels, may be a literal
    return output


def _opaque(linker: GraphBuilder, node: Node, positions: int, reason: str) -> Value:
    """Freeze a layer as it is; its work stays."""
    frozen: Value = linker.opaque(node, reason.format(linker.where(node)))
    weights = math.prod(node.args[1].meta["val"].shape)  # type: ignore[union-attr]
    linker.charges.append(ExtraMacs(frozen.atoms.ravel(), positions * weights))
    return frozen


@rule("linear")
def linear(linker: GraphBuilder, node: Node) -> Value:
    weight: Any = node.args[1]
    bias = argument(node, 2, "bias")
    value = linker.value(node.args[0])
    shape = node.meta["val"].shape
    positions = linker.positions(math.prod(shape[:-1]))
    inputs = value.along(len(value.shape) - 1) if isinstance(value, Value) else None
    if inputs is None:
        return _opaque(linker, node, positions, "the linear layer in {} reads them along another dimension")
    output = linker.fresh_value(node, len(shape) - 1)

    def build(name: str) -> LayerOp:
        # A Select picks along dimension 1.
        return LayerOp(name, "linear", 1, 1, padded=False, selectable=len(value.shape) == 2)

    if linker.add_mix(node, weight, bias, build, Use(inputs, output.atoms.ravel(), positions)):
        return output
    return _opaque(
        linker, node, positions, "the weight of the linear layer in {} is not a module's own parameter"
    )


@rule("batch_norm")
def batch_norm(linker: GraphBuilder, node: Node) -> Value:
    source, weight, bias, running_mean = node.args[:4]
    value = linker.value(source)
    inputs = value.along(1) if isinstance(value, Value) else None
    if inputs is None:
        return linker.opaque(
            node, f"the BatchNorm in {linker.where(node)} reads them along another dimension"
        )
    output = linker.fresh_value(node, 1)
    use = Use(inputs, output.atoms.ravel(), 0)
    if not linker.add_norm(node, weight if weight is not None else running_mean, bias, use):  # type: ignore[arg-type]
        return linker.opaque(
            node, f"the batch_norm in {linker.where(node)} does not use one known BatchNorm's own parameters"
        )
    return output


@rule("prelu")
def prelu(linker: GraphBuilder, node: Node) -> Any:
    value, slope = linker.value(node.args[0]), linker.value(node.args[1])
    inputs = value.along(1) if isinstance(value, Value) and isinstance(slope, Value) else None
    if inputs is None:
        return linker.opaque(node, f"the PReLU in {linker.where(node)} reads them along another dimension")
    if slope.shape[0] == len(inputs):
        linker.table.union(slope.atoms.ravel(), inputs)
    else:
        linker.table.pin(slope.atoms, f"one of them is the slope of all channels in {linker.where(node)}")
    output = linker.followed_value(node, value.atoms)
    linker.records.append(Map(value.atoms, output.atoms, evaluate=None))
    return output
