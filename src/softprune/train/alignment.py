"""Convolutions of odd widths, as networks have them once they are cut, made fit for tensor cores.

Tensor cores take bfloat16 channels eight at a time. For other widths cuDNN copies the images, the weights and their
gradients to padded ones and back around every convolution, which takes longer than many of the convolutions. Zeros
that the graph itself adds cost next to nothing: the compiler has the kernel before write them along.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

CHANNELS = 8
"""What widths are rounded up to."""
_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


def widened(graph: GraphModule) -> GraphModule | None:
    """A copy of a graph of torch.compile whose convolutions have whole multiples; None where all have them already.

    Results are the same, in value and layout, since the added channels are zero and are left out behind them. Widths
    below one multiple (the colours of an image) stay, for which there are kernels.
    """
    if not _odd_ones(graph):
        return None
    wide = copy.deepcopy(graph)
    for node in _odd_ones(wide):
        _widen(wide, node)
    wide.graph.lint()
    wide.recompile()
    return wide


def _odd_ones(graph: GraphModule) -> list[Node]:
    return [node for node in graph.graph.nodes if node.target is torch.conv2d and _is_odd(node)]


def _is_odd(node: Node) -> bool:
    arguments = _arguments(node)
    tensors = [_example(value) for value in (arguments.get("input"), arguments.get("weight"), node)]
    if not all(isinstance(tensor, FakeTensor) and tensor.dim() == 4 for tensor in tensors):
        return False  # an image without a batch, or a transform's tensor
    if arguments.get("groups", 1) != 1 or _layout(tensors[2]) is None:
        return False
    return any(_missing(width) for width in tensors[1].shape[:2])


def _example(value: Any) -> Any:
    """The stand-in that tells a value's shape; None where there is none."""
    return value.meta.get("example_value") if isinstance(value, Node) else None


def _layout(tensor: Tensor) -> torch.memory_format | None:
    for layout in (torch.contiguous_format, torch.channels_last):
        if tensor.is_contiguous(memory_format=layout):
            return layout
    return None


def _missing(width: int) -> int:
    """Channels to add."""
    return -width % CHANNELS if width > CHANNELS else 0


def _arguments(node: Node) -> dict[str, Any]:
    return dict(zip(_NAMES, node.args, strict=False)) | dict(node.kwargs)


def _replace(node: Node, name: str, value: Node) -> None:
    """Another argument, by position or by name, as it was given."""
    if name in node.kwargs:
        node.update_kwarg(name, value)
    else:
        node.update_arg(_NAMES.index(name), value)


def _widen(graph: GraphModule, node: Node) -> None:
    arguments = _arguments(node)
    result: Any = _example(node)
    outputs, inputs = (_missing(width) for width in _example(arguments["weight"]).shape[:2])

    def call(function: Callable[..., Tensor], *values: Any, **options: Any) -> Node:
        made = graph.graph.call_function(function, values, options)
        with torch.no_grad(), result.fake_mode:
            tensors = [_example(value) if isinstance(value, Node) else value for value in values]
            made.meta["example_value"] = function(*tensors, **options)
        return made

    with graph.graph.inserting_before(node):
        if inputs:
            _replace(node, "input", call(F.pad, arguments["input"], (0, 0, 0, 0, 0, inputs)))
        _replace(node, "weight", call(F.pad, arguments["weight"], (0, 0, 0, 0, 0, inputs, 0, outputs)))
        if outputs and arguments.get("bias") is not None:
            _replace(node, "bias", call(F.pad, arguments["bias"], (0, outputs)))
    if outputs:
        batch, width, *size = result.shape
        layout = _layout(result)
        with result.fake_mode:
            wide = result.new_empty((batch, width + outputs, *size))
            node.meta["example_value"] = wide.to(memory_format=layout)
        with graph.graph.inserting_after(node):
            kept = call(torch.narrow, node, 1, 0, width)
        # What follows may rely on the strides that it was traced with; the compiler has no need to copy for that.
        with graph.graph.inserting_after(kept):
            same = call(torch.clone, kept, memory_format=layout)
        node.replace_all_uses_with(same, delete_user_cb=lambda user: user is not kept)
