"""Which channels are constant over batch and space under the hard masks, and at what value.

A dropped channel is exactly zero. After a further BatchNorm a zero becomes another constant, an activation maps a
constant to a constant, and a layer that reads only constants returns constants. All values are float64. What
parameters outside layers give by themselves, such as an embedding, is not constant: training changes it. Nor is
infinity, which is remembered because zero times infinity is not zero.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from softprune.graph import ChannelGraph
from softprune.graph.channels import PAD, IntArray
from softprune.graph.ops import (
    BinaryOp,
    ChannelwiseOp,
    ConstantOp,
    Evaluate,
    ForwardAnalysis,
    FreeParameter,
    LayerOp,
    NormOp,
    Use,
)

FloatArray = NDArray[np.float64]


def constants(graph: ChannelGraph, model: nn.Module, masks: Mapping[str, NDArray[np.bool_]]) -> FloatArray:
    """Return the constant value of every atom; NaN for atoms that are not constant."""
    found = _Constants(graph, model, masks)
    found.forward(graph.ops)
    return found.known(np.arange(len(graph.classes)))


class _Constants(ForwardAnalysis):
    def __init__(self, graph: ChannelGraph, model: nn.Module, masks: Mapping[str, NDArray[np.bool_]]) -> None:
        self.modules: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
        self.masks = masks
        self.values: FloatArray = np.full(len(graph.classes), np.nan)
        self.values[PAD] = 0.0
        self.trained = np.zeros(len(graph.classes), dtype=bool)
        for parameter in graph.free_parameters:
            self.values[parameter.atoms] = _parameter_values(parameter, model)
            self.trained[parameter.atoms] = True
        super().__init__(self.values, self.trained)

    def known(self, atoms: IntArray) -> FloatArray:
        """Return the values of `atoms`; NaN for infinite ones and for those that parameters alone give."""
        return np.where(self.trained[atoms] | np.isinf(self.values[atoms]), np.nan, self.values[atoms])

    def layer(self, op: LayerOp, use: Use) -> None:
        module = self.modules[use.module]
        self.values[use.outputs] = _layer_constants(op, module, self.known(use.inputs), len(use.outputs))

    def norm(self, op: NormOp, use: Use) -> None:
        self.values[use.outputs] = _normalised(self.modules[op.name], self.known(use.inputs))
        if op.name in self.masks:
            self.values[use.outputs[~self.masks[op.name]]] = 0.0

    def channelwise(self, op: ChannelwiseOp) -> None:
        inputs = self.values[op.inputs].ravel()
        out: FloatArray = np.where(np.isinf(inputs), inputs, np.nan)
        if op.evaluate is not None:
            known = np.isfinite(inputs)
            if known.any():
                out[known] = _evaluated(op.evaluate, inputs[known])
        elif op.keeps_zero:
            out[inputs == 0] = 0.0
        self.values[op.outputs] = out.reshape(op.inputs.shape)
        self.trained[op.outputs] = self.trained[op.inputs]

    def binary(self, op: BinaryOp) -> None:
        left, right = self.values[op.left], self.values[op.right]
        infinite = np.isinf(left) | np.isinf(right)
        out: FloatArray = np.where(infinite, np.inf, np.nan)
        known = np.isfinite(left) & np.isfinite(right)
        if known.any():
            out[known] = _evaluated(op.evaluate, left[known], right[known])
        if op.absorbs_zero:
            # A parameter that is zero now, such as a layer scale at its start, may change in training.
            dead_left = (left == 0) & ~self.trained[op.left]
            dead_right = (right == 0) & ~self.trained[op.right]
            out[(dead_left | dead_right) & ~infinite] = 0.0
        self.values[op.outputs] = out
        self.trained[op.outputs] = self.trained[op.left] & self.trained[op.right]

    def constant(self, op: ConstantOp) -> None:
        self.values[op.outputs] = op.values.numpy()


def _array(tensor: Tensor) -> FloatArray:
    if tensor.is_meta:
        return np.full(tuple(tensor.shape), np.nan)
    return tensor.detach().to("cpu", torch.float64).numpy()


def _normalised(module: Any, inputs: FloatArray) -> FloatArray:
    if np.isnan(inputs).all():
        return np.full(len(inputs), np.nan)
    if getattr(module, "running_mean", None) is None:  # the statistics of the input itself
        out = np.where(inputs == 0, 0.0, np.nan)
    else:
        out = (inputs - _array(module.running_mean)) / np.sqrt(_array(module.running_var) + module.eps)
    if module.weight is not None:
        out = out * _array(module.weight) + _array(module.bias)
    return out


def _layer_constants(op: LayerOp, module: Any, inputs: FloatArray, width: int) -> FloatArray:
    out: FloatArray = np.full(width, np.nan)
    by_group = inputs.reshape(op.groups, -1)
    zero = (by_group == 0).all(axis=1)
    # Zero padding around a constant other than zero adds a border, so that the output is not constant.
    constant = zero if op.padded else ~np.isnan(by_group).any(axis=1)
    if not constant.any():
        return out
    bias = _array(module.bias) if module.bias is not None else np.zeros(width)
    out = out.reshape(op.groups, -1)
    out[constant] = bias.reshape(op.groups, -1)[constant]
    live = constant & ~zero
    if live.any():
        weight = _array(module.weight)
        weight = weight.reshape(*weight.shape[:2], -1).sum(axis=2)
        grouped = weight.reshape(op.groups, -1, weight.shape[1])
        sums = np.einsum("goi,gi->go", grouped, np.nan_to_num(by_group))
        out[live] += sums[live]
    return out.ravel()


def _evaluated(evaluate: Evaluate, *columns: FloatArray) -> FloatArray:
    found = evaluate(*(torch.from_numpy(column.copy()) for column in columns))
    return np.full(columns[0].shape, np.nan) if found.is_complex() else _array(found)


def _parameter_values(parameter: FreeParameter, model: nn.Module) -> FloatArray | float:
    """Return the values of a parameter outside layers; NaN unless it has one number per channel."""
    path, _, attribute = parameter.name.rpartition(".")
    tensor: Tensor = getattr(model.get_submodule(path), attribute)
    if tensor.is_complex() or tensor.numel() != len(parameter.atoms):
        return np.nan
    return _array(tensor).ravel()


def constant_contribution(weight: Tensor, kept: IntArray, values: FloatArray) -> Tensor:
    """Return what the inputs outside `kept`, constant at `values`, add to each output of a layer with one group."""
    dropped = values.copy()
    dropped[kept] = 0.0
    columns = weight.detach().to("cpu", torch.float64)
    return columns.reshape(*columns.shape[:2], -1).sum(dim=2) @ torch.from_numpy(dropped)
