"""Rules for the operators with weights: convolutions, linear layers, BatchNorm, PReLU; and our own Select and Void."""

from __future__ import annotations

import math
from typing import Any

from torch.fx import Node

from softprune.graph.link import Linker, Value, rule
from softprune.graph.records import Map, Mix, Use


def _argument(node: Node, index: int, name: str, default: Any = None) -> Any:
    if len(node.args) > index:
        return node.args[index]
    return node.kwargs.get(name, default)


def _is_unpadded(padding: Any, kernel: Any) -> bool:
    if isinstance(padding, str):  # "same" pads what the kernel reaches beyond its own position
        return padding == "valid" or math.prod(kernel) == 1
    return not any(padding) if isinstance(padding, (list, tuple)) else not padding


@rule("conv1d", "conv2d", "conv3d")
def convolution(linker: Linker, node: Node) -> Value:
    return _convolve(linker, node, transposed=False, groups=_argument(node, 6, "groups", 1))


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def transposed_convolution(linker: Linker, node: Node) -> Value:
    return _convolve(linker, node, transposed=True, groups=_argument(node, 6, "groups", 1))


def _convolve(linker: Linker, node: Node, *, transposed: bool, groups: int) -> Value:
    source, weight, bias = node.args[0], node.args[1], _argument(node, 2, "bias")
    value = linker.value(source)
    inputs = value.along(1) if isinstance(value, Value) else None
    shape = node.meta["val"].shape
    if inputs is None or len(shape) != weight.meta["val"].ndim:  # type: ignore[union-attr]
        return linker.opaque(
            node, f"the convolution in {linker.where(node)} reads them along another dimension"
        )
    output = linker.fresh_value(node, 1)
    weight_shape = weight.meta["val"].shape  # type: ignore[union-attr]
    # A transposed convolution leaves positions that fewer weights reach: its constants are no constants.
    kernel = weight_shape[2:]
    padded = transposed or not _is_unpadded(_argument(node, 4, "padding", 0), kernel)
    moved = value.shape if transposed else shape  # a transposed convolution's weights act per input position
    use = Use(inputs, output.atoms.ravel(), linker.positions(math.prod(moved[2:]) * moved[0]))

    def build(name: str) -> Mix:
        kind = "conv_transpose" if transposed else "conv"
        return Mix(name, kind, groups, math.prod(kernel), padded, selectable=True)

    if not linker.add_mix(node, weight, bias, build, use):  # type: ignore[arg-type]
        return linker.opaque(
            node, f"the weight of the convolution in {linker.where(node)} is not a module's own parameter"
        )
    if groups > 1 and len(inputs) == groups and shape[1] > groups:
        # Depthwise with a multiplier: the outputs of one input go together.
        grouped = output.atoms.reshape(groups, -1)
        linker.table.union(grouped[:, :1], grouped)
    return output


@rule("linear")
def linear(linker: Linker, node: Node) -> Value:
    source, weight, bias = node.args[0], node.args[1], _argument(node, 2, "bias")
    value = linker.value(source)
    inputs = value.along(len(value.shape) - 1) if isinstance(value, Value) else None
    if inputs is None:
        return linker.opaque(
            node, f"the linear layer in {linker.where(node)} reads them along another dimension"
        )
    shape = node.meta["val"].shape
    output = linker.fresh_value(node, len(shape) - 1)
    use = Use(inputs, output.atoms.ravel(), linker.positions(math.prod(shape[:-1])))

    def build(name: str) -> Mix:
        # A Select picks along dimension 1.
        return Mix(name, "linear", 1, 1, padded=False, selectable=len(value.shape) == 2)

    if not linker.add_mix(node, weight, bias, build, use):  # type: ignore[arg-type]
        return linker.opaque(
            node, f"the weight of the linear layer in {linker.where(node)} is not a module's own parameter"
        )
    return output


@rule("batch_norm")
def batch_norm(linker: Linker, node: Node) -> Value:
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
def prelu(linker: Linker, node: Node) -> Any:
    value, slope = linker.value(node.args[0]), linker.value(node.args[1])
    inputs = value.along(1) if isinstance(value, Value) and isinstance(slope, Value) else None
    if inputs is None:
        return linker.opaque(node, f"the PReLU in {linker.where(node)} reads them along another dimension")
    if slope.shape[0] == len(inputs):
        linker.table.union(slope.atoms.ravel(), inputs)
    output = linker.followed_value(node, value.atoms)
    linker.records.append(Map(value.atoms, output.atoms, evaluate=None))
    return output
