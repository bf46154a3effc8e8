"""Convolutions of odd widths, as networks have them once they are cut, made fit for tensor cores.

Tensor cores take bfloat16 channels eight at a time. For other widths cuDNN copies the images, the weights and their
gradients to padded ones and back around every convolution, which takes longer than many of the convolutions. Zeros
that the graph itself adds cost next to nothing: the compiler has the kernel before write them along.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

CHANNELS = 8
"""What widths are rounded up to."""


def align_channels(graph: GraphModule) -> int:
    """Widen the convolutions in a graph of torch.compile to whole multiples; returns how many.

    Their results are the same, since the added channels are zero and are left out behind them. Inputs of fewer
    channels than one multiple (images) stay, for which there are kernels.
    """
    found = [node for node in graph.graph.nodes if node.target is torch.conv2d and _is_odd(node)]
    for node in found:
        _widen(graph, node)
    if found:
        graph.graph.lint()
        graph.recompile()
    return len(found)


def _is_odd(node: Node) -> bool:
    arguments = _arguments(node)
    weight = arguments["weight"].meta["example_value"]
    groups = arguments.get("groups", 1)
    return groups == 1 and any(_missing(width) for width in weight.shape[:2])


def _missing(width: int) -> int:
    """Channels to add."""
    return -width % CHANNELS if width > CHANNELS else 0


def _arguments(node: Node) -> dict[str, Any]:
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def _widen(graph: GraphModule, node: Node) -> None:
    arguments = _arguments(node)
    result: Tensor = node.meta["example_value"]
    outputs, inputs = (_missing(width) for width in arguments["weight"].meta["example_value"].shape[:2])

    def call(function: Callable[..., Tensor], *values: Any) -> Node:
        made = graph.graph.call_function(function, values)
        with torch.no_grad(), result.fake_mode:  # type: ignore[attr-defined]
            tensors = [value.meta["example_value"] if isinstance(value, Node) else value for value in values]
            made.meta["example_value"] = function(*tensors)
        return made

    with graph.graph.inserting_before(node):
        if inputs:
            arguments["input"] = call(F.pad, arguments["input"], (0, 0, 0, 0, 0, inputs))
        arguments["weight"] = call(F.pad, arguments["weight"], (0, 0, 0, 0, 0, inputs, 0, outputs))
        if outputs and arguments.get("bias") is not None:
            arguments["bias"] = call(F.pad, arguments["bias"], (0, outputs))
        node.args, node.kwargs = tuple(arguments.values()), {}
    if outputs:
        batch, width, *size = result.shape
        with result.fake_mode:  # type: ignore[attr-defined]
            node.meta["example_value"] = result.new_empty((batch, width + outputs, *size))
        with graph.graph.inserting_after(node):
            kept = call(torch.narrow, node, 1, 0, width)
        node.replace_all_uses_with(kept, delete_user_cb=lambda user: user is not kept)
