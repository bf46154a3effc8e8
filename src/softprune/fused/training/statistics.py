"""BatchNorms of concatenations, as in DenseNet: compute the statistics of every channel once.

A dense layer normalises the outputs of all layers before it, and would compute the mean and variance of the first
channels again in every layer. Here each part of a concatenation keeps its statistics.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from softprune.fused.training.convolutions import example

_NAMES = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_DEFAULTS = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}


@dataclass(frozen=True)
class Sharing:
    """A BatchNorm in training that shares statistics with another one, and the parts of its input."""

    norm: Node
    arguments: dict[str, Any]
    parts: list[Node]


def shared_statistics(graph: GraphModule) -> list[Sharing]:
    """Return the BatchNorms that share statistics. Parts that are written in place are excluded."""
    written = _written(graph)
    found = []
    for norm in graph.graph.find_nodes(op="call_function", target=F.batch_norm):
        arguments = _arguments(norm)
        if _is_plain(arguments):
            parts = _parts(arguments["input"], written)
            if not any(_storage(part) in written for part in parts):
                found.append(Sharing(norm, arguments, parts))
    readers = Counter(part for each in found for part in each.parts)
    return [each for each in found if any(readers[part] > 1 for part in each.parts)]


def share_statistics(graph: GraphModule) -> None:
    """Rewrite these BatchNorms to use the statistics of their parts."""
    known: dict[Node, Node] = {}
    inputs = graph.graph.find_nodes(op="placeholder")
    for each in shared_statistics(graph):
        for part in each.parts:
            if part not in known:
                # Directly after the part: a reader may be in a region without gradients.
                with graph.graph.inserting_after(inputs[-1] if part.op == "placeholder" else part):
                    known[part] = graph.graph.call_function(moments, (part,))
        with graph.graph.inserting_before(each.norm):
            together = graph.graph.call_function(torch.cat, ([known[part] for part in each.parts], 1))
            made = graph.graph.call_function(
                normalise, (together, *(each.arguments[name] for name in _NAMES if name != "training"))
            )
        made.meta["example_value"] = example(each.norm)
        each.norm.replace_all_uses_with(made)
        graph.graph.erase_node(each.norm)


def moments(images: Tensor) -> Tensor:
    """Return mean and variance of every channel, stacked."""
    dimensions = [0, *range(2, images.dim())]
    variance, mean = torch.var_mean(images.to(_wide(images)), dimensions, correction=0)
    return torch.stack([mean, variance])


def normalise(
    both: Tensor,
    images: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    momentum: float,
    eps: float,
) -> Tensor:
    """Compute batch_norm in training mode from given statistics."""
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            count = images.numel() // images.shape[1]
            running_mean.lerp_(both[0].to(running_mean.dtype), momentum)
            running_var.lerp_((both[1] * (count / (count - 1))).to(running_var.dtype), momentum)
    result: Tensor = _Normalised.apply(images, both, weight, bias, eps)  # type: ignore[no-untyped-call]
    return result


class _Normalised(torch.autograd.Function):
    """(images - mean) / deviation * weight + bias, with a gradient for the statistics."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, both: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        inverse = (both[1] + eps).rsqrt()
        ctx.save_for_backward(images, both[0], inverse, weight)
        scaled = _centred(images, both[0]) * _along(inverse * weight, images) + _along(bias, images)
        return scaled.to(images.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        images, mean, inverse, weight = ctx.saved_tensors
        gradient = gradients[0].to(_wide(images))
        dimensions = [0, *range(2, images.dim())]
        of_bias = gradient.sum(dimensions)
        of_weight = (gradient * (_centred(images, mean) * _along(inverse, images))).sum(dimensions)
        scale = weight * inverse
        of_both = torch.stack([-scale * of_bias, -0.5 * scale * inverse * of_weight])
        of_images = (gradient * _along(scale, images)).to(images.dtype)
        return of_images, of_both, of_weight.to(weight.dtype), of_bias.to(weight.dtype), None


def _centred(images: Tensor, mean: Tensor) -> Tensor:
    return images.to(_wide(images)) - _along(mean, images)


def _along(values: Tensor, images: Tensor) -> Tensor:
    return values.view(-1, *(1,) * (images.dim() - 2))


def _wide(images: Tensor) -> torch.dtype:
    return torch.promote_types(images.dtype, torch.float32)


def _arguments(norm: Node) -> dict[str, Any]:
    return _DEFAULTS | dict(zip(_NAMES, norm.args, strict=False)) | dict(norm.kwargs)


def _is_plain(arguments: dict[str, Any]) -> bool:
    """Return whether it is in training mode, has weight and bias, and its input has a known shape."""
    images = example(arguments["input"])
    if arguments["training"] is not True or not isinstance(images, FakeTensor) or images.dim() < 3:
        return False
    return isinstance(arguments["weight"], Node) and isinstance(arguments["bias"], Node)


def _parts(node: Node, written: set[int]) -> list[Node]:
    """Return the parts that `node` concatenates along the channels, or the node itself."""
    if node.target is not torch.cat or _storage(node) in written:
        return [node]
    tensors: Any = node.args[0] if node.args else node.kwargs.get("tensors")
    dimension = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    images = [example(part) for part in tensors] if isinstance(tensors, (list, tuple)) else []
    if dimension not in (1, 1 - example(node).dim()) or not all(isinstance(each, FakeTensor) for each in images):
        return [node]
    return [part for tensor in tensors for part in _parts(tensor, written)]


def _written(graph: GraphModule) -> set[int]:
    """Return the storages that the graph writes in place, by the version counters of the fake tensors."""
    values = [example(node) for node in graph.graph.nodes]
    return {value.untyped_storage()._cdata for value in values if isinstance(value, FakeTensor) and value._version > 0}


def _storage(node: Node) -> int:
    return int(example(node).untyped_storage()._cdata)
