"""The convolutions of a graph of torch.compile: reading them, writing operations beside them, padding odd widths."""

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
    """A call of conv2d on a batch, without groups. Shapes are those of its fake tensors."""

    def __init__(self, graph: GraphModule, node: Node) -> None:
        self.graph, self.node = graph.graph, node

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name, read each time: rewriting another convolution may replace the input."""
        return dict(zip(_NAMES, self.node.args, strict=False)) | dict(self.node.kwargs)

    @property
    def is_plain(self) -> bool:
        """Whether it may be rewritten: a batch of images, no groups, no tensors of function transforms."""
        tensors = [example(self.arguments.get(name)) for name in ("input", "weight")] + [example(self.node)]
        if not all(isinstance(tensor, FakeTensor) and tensor.dim() == 4 for tensor in tensors):
            return False
        return self.arguments.get("groups", 1) == 1 and layout_of(self.result) is not None

    @property
    def result(self) -> Tensor:
        """The fake tensor of the output."""
        return example(self.node)

    @property
    def image(self) -> Tensor:
        """The fake tensor of the input."""
        return example(self.arguments["input"])

    @property
    def widths(self) -> tuple[int, int]:
        """Output and input channels."""
        outputs, inputs = example(self.arguments["weight"]).shape[:2]
        return outputs, inputs

    @property
    def kernel(self) -> tuple[int, int]:
        height, width = example(self.arguments["weight"]).shape[2:]
        return height, width

    def replace(self, name: str, value: Node) -> None:
        """Replace an argument, by position or by name as it was given."""
        if name in self.node.kwargs:
            self.node.update_kwarg(name, value)
        else:
            self.node.update_arg(_NAMES.index(name), value)

    def call(self, function: Callable[..., Tensor], *values: Any, **options: Any) -> Node:
        """Add a call at the insertion point of the graph, with its fake tensor."""
        made = self.graph.call_function(function, values, options)
        mode: Any = self.result
        with torch.no_grad(), mode.fake_mode:
            tensors = [example(value) if isinstance(value, Node) else value for value in values]
            made.meta["example_value"] = function(*tensors, **options)
        return made


def convolutions(graph: GraphModule) -> list[TracedConvolution]:
    """Return the convolutions that may be rewritten. An activation checkpoint is a separate graph and stays."""
    found = [TracedConvolution(graph, node) for node in graph.graph.nodes if node.target is torch.conv2d]
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
    return any(alignment_padding(width) for width in convolution.widths)


def pad_to_multiple(convolution: TracedConvolution) -> None:
    """Pad the channels with zeros to multiples of eight and drop them from the output, which keeps its layout.

    For odd widths cuDNN copies images, weights and gradients to padded buffers around every convolution. Zeros added in
    the graph are cheap, because the compiler lets the preceding kernel write them.
    """
    node, arguments, result = convolution.node, convolution.arguments, convolution.result
    outputs, inputs = (alignment_padding(width) for width in convolution.widths)
    with convolution.graph.inserting_before(node):
        if inputs:
            image = convolution.call(F.pad, arguments["input"], (0, 0, 0, 0, 0, inputs))
            convolution.replace("input", image)
        weight = convolution.call(F.pad, arguments["weight"], (0, 0, 0, 0, 0, inputs, 0, outputs))
        convolution.replace("weight", weight)
        if outputs and arguments.get("bias") is not None:
            convolution.replace("bias", convolution.call(F.pad, arguments["bias"], (0, outputs)))
    if outputs:
        batch, width, *size = result.shape
        layout = layout_of(result)
        with result.fake_mode:  # type: ignore[attr-defined]
            wide = result.new_empty((batch, width + outputs, *size))
            node.meta["example_value"] = wide.to(memory_format=layout)
        with convolution.graph.inserting_after(node):
            kept = convolution.call(torch.narrow, node, 1, 0, width)
        # Later nodes may rely on the strides of the trace. The compiler needs no copy for this clone.
        with convolution.graph.inserting_after(kept):
            same = convolution.call(torch.clone, kept, memory_format=layout)
        node.replace_all_uses_with(same, delete_user_cb=lambda user: user is not kept)
