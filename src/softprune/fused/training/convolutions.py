"""The convolutions of a graph of torch.compile: reading them, and padding odd widths.

A rewrite lets a node call another function in place of conv2d. The compiler traces through it.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from softprune.hardware import alignment_padding

_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


class TracedConvolution:
    """A call of conv2d on a batch, without groups. `image`, `weight` and `result` are fake tensors."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.arguments: dict[str, Any] = dict(zip(_NAMES, node.args, strict=False)) | dict(node.kwargs)
        self.image, self.weight = (example(self.arguments.get(name)) for name in ("input", "weight"))
        self.result = example(node)

    @property
    def is_plain(self) -> bool:
        """Whether it may be rewritten: a batch of images, no groups, no tensors of function transforms."""
        tensors = (self.image, self.weight, self.result)
        if not all(isinstance(tensor, FakeTensor) and tensor.dim() == 4 for tensor in tensors):
            return False
        return self.arguments.get("groups", 1) == 1 and layout_of(self.result) is not None

    def call_instead(self, function: Callable[..., Tensor], **options: Any) -> None:
        """Let the node call `function`, which takes the arguments of conv2d, and its `options`.

        Later nodes may rely on the strides of the trace, so that it returns a tensor in the option `layout`.
        """
        self.node.target = function
        self.node.kwargs = {**self.node.kwargs, "layout": layout_of(self.result), **options}


def convolutions(graph: GraphModule) -> list[TracedConvolution]:
    """Return the convolutions that may be rewritten. An activation checkpoint is a separate graph and stays."""
    found = [TracedConvolution(node) for node in graph.graph.nodes if node.target is torch.conv2d]
    return [each for each in found if each.is_plain]


def example(value: Any) -> Any:
    """Return the fake tensor of a node, or None."""
    return value.meta.get("example_value") if isinstance(value, Node) else None


def layout_of(tensor: Tensor) -> torch.memory_format | None:
    """Return the memory format, or None if it is neither contiguous nor channels_last."""
    for layout in (torch.contiguous_format, torch.channels_last):
        if tensor.is_contiguous(memory_format=layout):
            return layout
    return None


def is_odd(convolution: TracedConvolution) -> bool:
    """Return whether a width is not a multiple of eight, such as the three colours of an image."""
    return any(alignment_padding(width) for width in convolution.weight.shape[:2])


def padded_conv2d(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *steps: Any, layout: torch.memory_format, **named: Any
) -> Tensor:
    """Compute conv2d with channels padded with zeros to multiples of eight, which the output does not have.

    For odd widths cuDNN copies images, weights and gradients to padded buffers around every convolution. Zeros added in
    the graph are cheap, because the compiler lets the preceding kernel write them.
    """
    outputs, inputs = (alignment_padding(width) for width in weight.shape[:2])
    image = F.pad(input, (0, 0, 0, 0, 0, inputs)) if inputs else input
    wide = F.pad(weight, (0, 0, 0, 0, 0, inputs, 0, outputs))
    if outputs and bias is not None:
        bias = F.pad(bias, (0, outputs))
    result = torch.conv2d(image, wide, bias, *steps, **named)
    # The compiler needs no copy for this clone.
    return result.narrow(1, 0, len(weight)).clone(memory_format=layout) if outputs else result
