"""Reading the convolutions of a graph of torch.compile, and writing other operations beside them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


class Convolution:
    """A call of conv2d on a batch, without groups; shapes are those of its stand-ins."""

    def __init__(self, graph: GraphModule, node: Node) -> None:
        self.graph, self.node = graph.graph, node

    @property
    def arguments(self) -> dict[str, Any]:
        """By name; read anew each time, since rewriting the one before may replace its input."""
        return dict(zip(_NAMES, self.node.args, strict=False)) | dict(self.node.kwargs)

    @property
    def is_plain(self) -> bool:
        """Whether it may be rewritten: not an image without a batch or a transform's tensor, which read otherwise."""
        tensors = [example(self.arguments.get(name)) for name in ("input", "weight")] + [example(self.node)]
        if not all(isinstance(tensor, FakeTensor) and tensor.dim() == 4 for tensor in tensors):
            return False
        return self.arguments.get("groups", 1) == 1 and layout_of(self.result) is not None

    @property
    def result(self) -> Tensor:
        """The stand-in of what comes out."""
        found: Tensor = example(self.node)
        return found

    @property
    def image(self) -> Tensor:
        """The stand-in of what goes in."""
        found: Tensor = example(self.arguments["input"])
        return found

    @property
    def widths(self) -> tuple[int, int]:
        """Outputs and inputs."""
        outputs, inputs = example(self.arguments["weight"]).shape[:2]
        return outputs, inputs

    @property
    def kernel(self) -> tuple[int, int]:
        """Height and width."""
        height, width = example(self.arguments["weight"]).shape[2:]
        return height, width

    def replace(self, name: str, value: Node) -> None:
        """Another argument, by position or by name, as it was given."""
        if name in self.node.kwargs:
            self.node.update_kwarg(name, value)
        else:
            self.node.update_arg(_NAMES.index(name), value)

    def call(self, function: Callable[..., Tensor], *values: Any, **options: Any) -> Node:
        """Write a call where the graph is being written, with its stand-in."""
        made = self.graph.call_function(function, values, options)
        mode: Any = self.result
        with torch.no_grad(), mode.fake_mode:
            tensors = [example(value) if isinstance(value, Node) else value for value in values]
            made.meta["example_value"] = function(*tensors, **options)
        return made


def convolutions(graph: GraphModule) -> list[Convolution]:
    """Those of a graph that may be rewritten; an activation checkpoint is a graph of its own, which stays."""
    found = [Convolution(graph, node) for node in graph.graph.nodes if node.target is torch.conv2d]
    return [each for each in found if each.is_plain]


def example(value: Any) -> Any:
    """The stand-in that tells a value's shape; None where there is none."""
    return value.meta.get("example_value") if isinstance(value, Node) else None


def layout_of(tensor: Tensor) -> torch.memory_format | None:
    """Its memory order, where it is one of the two usual ones."""
    for layout in (torch.contiguous_format, torch.channels_last):
        if tensor.is_contiguous(memory_format=layout):
            return layout
    return None
