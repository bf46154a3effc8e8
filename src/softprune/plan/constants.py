"""Zero flows forward: which channels are constant over batch and space once the masks are hard, and at what value.

A dropped channel is exactly zero. Behind a further BatchNorm a zero becomes another constant, behind an activation
that constant's image, and a layer that reads only constants gives constants. Everything is float64.
"""

from __future__ import annotations

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
    FreeParameter,
    LayerCall,
    LayerOp,
    SelectOp,
)

FloatArray = NDArray[np.float64]


def constants(graph: ChannelGraph, model: nn.Module, masks: Mapping[str, NDArray[np.bool_]]) -> FloatArray:
    """The constant value of every atom; NaN where the atom is live."""
    values: FloatArray = np.full(len(graph.classes), np.nan)
    values[PAD] = 0.0
    for loose in graph.free_parameters:
        values[loose.atoms] = _loose_values(loose, model)
    trained = (
        np.concatenate([loose.atoms for loose in graph.free_parameters])
        if graph.free_parameters
        else np.zeros(0, int)
    )
    for record in graph.ops:
        if isinstance(record, LayerCall):
            layer, use = record.layer, record.use
            if isinstance(layer, LayerOp):
                module = model.get_submodule(use.module)
                values[use.outputs] = _mixed(layer, module, values[use.inputs], len(use.outputs))
                continue
            values[use.outputs] = _normalised(model.get_submodule(layer.name), values[use.inputs])
            if layer.name in masks:
                values[use.outputs[~masks[layer.name]]] = 0.0
        elif isinstance(record, ChannelwiseOp):
            values[record.outputs] = _mapped(record, values[record.inputs])
        elif isinstance(record, BinaryOp):
            values[record.outputs] = _joined(record, values, trained)
        elif isinstance(record, SelectOp):
            values[record.outputs] = values[record.inputs]
        elif isinstance(record, ConstantOp):
            values[record.outputs] = record.values.numpy()
    return values


def _array(tensor: Tensor) -> FloatArray:
    if tensor.is_meta:
        return np.full(tuple(tensor.shape), np.nan)
    return tensor.detach().to("cpu", torch.float64).numpy()


def _normalised(module: Any, inputs: FloatArray) -> FloatArray:
    if np.isnan(inputs).all() or getattr(module, "running_mean", None) is None:
        return np.full(len(inputs), np.nan)
    scale = 1.0 / np.sqrt(_array(module.running_var) + module.eps)
    out = (inputs - _array(module.running_mean)) * scale
    if module.weight is not None:
        out = out * _array(module.weight) + _array(module.bias)
    return out


def _mixed(record: LayerOp, module: Any, inputs: FloatArray, width: int) -> FloatArray:
    out: FloatArray = np.full(width, np.nan)
    by_group = inputs.reshape(record.groups, -1)
    zero = (by_group == 0).all(axis=1)
    # Zero padding around a constant other than zero gives a border: no constant any more.
    constant = zero if record.padded else ~np.isnan(by_group).any(axis=1)
    if not constant.any():
        return out
    bias = _array(module.bias) if module.bias is not None else np.zeros(width)
    out = out.reshape(record.groups, -1)
    out[constant] = bias.reshape(record.groups, -1)[constant]
    live = constant & ~zero
    if live.any():
        weight = _array(module.weight)
        weight = weight.reshape(*weight.shape[:2], -1).sum(axis=2)
        grouped = weight.reshape(record.groups, -1, weight.shape[1])
        sums = np.einsum("goi,gi->go", grouped, np.nan_to_num(by_group))
        out[live] += sums[live]
    return out.ravel()


def _evaluated(evaluate: Evaluate, *columns: FloatArray) -> FloatArray:
    out = _array(evaluate(*(torch.from_numpy(column.copy()) for column in columns)))
    return np.where(np.isfinite(out), out, np.nan)  # the reciprocal of zero, say: nothing to calculate with


def _mapped(record: ChannelwiseOp, inputs: FloatArray) -> FloatArray:
    flat = inputs.ravel()
    out: FloatArray = np.full(flat.shape, np.nan)
    if record.evaluate is not None:
        known = ~np.isnan(flat)
        if known.any():
            out[known] = _evaluated(record.evaluate, flat[known])
    elif record.keeps_zero:
        out[flat == 0] = 0.0
    return out.reshape(inputs.shape)


def _joined(record: BinaryOp, values: FloatArray, trained: IntArray) -> FloatArray:
    left, right = values[record.left], values[record.right]
    out: FloatArray = np.full(left.shape, np.nan)
    known = ~np.isnan(left) & ~np.isnan(right)
    if known.any():
        out[known] = _evaluated(record.evaluate, left[known], right[known])
    if record.absorbs_zero:
        # A parameter that is zero now (a layer scale at its start, say) may be something else tomorrow.
        silent_left = (left == 0) & ~np.isin(record.left, trained)
        silent_right = (right == 0) & ~np.isin(record.right, trained)
        out[silent_left | silent_right] = 0.0
    return out


def _loose_values(loose: FreeParameter, model: nn.Module) -> FloatArray | float:
    """A parameter outside of layers, as far as it is one number per channel."""
    path, _, attribute = loose.name.rpartition(".")
    tensor: Tensor = getattr(model.get_submodule(path), attribute)
    if not tensor.is_floating_point() or (loose.dim < 0 and tensor.numel() != 1):
        return np.nan
    return _array(tensor).ravel()


def mixed_constant(weight: Tensor, kept: IntArray, values: FloatArray) -> Tensor:
    """What the inputs that are not `kept`, constant at `values`, add to each output of a layer with one group."""
    dropped = np.setdiff1d(np.arange(len(values)), kept)
    columns = weight.detach().to("cpu", torch.float64)
    columns = columns.reshape(*columns.shape[:2], -1).sum(dim=2)
    return columns[:, dropped] @ torch.from_numpy(values[dropped])
