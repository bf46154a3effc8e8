"""The graph that is being fused: the fused operator, the convolutions, and how to replace them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

HALF = (torch.float16, torch.bfloat16)
"""Precisions for which cuDNN fuses on tensor cores. In float32 its fused kernels are slow."""


@torch.library.custom_op("softprune::conv2d_relu", mutates_args=())
def conv2d_relu(
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    """Compute relu(conv2d(image, weight, bias) + other). One kernel in half precision on NVIDIA GPUs."""
    # cuDNN may refuse an empty batch.
    if image.numel() == 0 or not has_kernel(image.device, image.dtype):
        result = F.conv2d(image, weight, bias, stride, padding, dilation, groups)
        return F.relu(result if other is None else result + other)
    steps = (stride, padding, dilation, groups)
    if other is None:
        found: Tensor = torch.ops.aten.cudnn_convolution_relu(image, weight, bias, *steps)
    else:
        found = torch.ops.aten.cudnn_convolution_add_relu(image, weight, other, 1.0, bias, *steps)
    return found


@conv2d_relu.register_fake
def _(image: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor | None, *steps: Any) -> Tensor:
    return F.conv2d(image, weight, bias, *steps)


CONV_RELU = torch.ops.softprune.conv2d_relu.default
"""The operator as it appears in graphs."""


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the operator is one kernel on this device and in this precision."""
    return device.type == "cuda" and torch.version.hip is None and dtype in HALF


CONV = torch.ops.aten.conv2d.default

Steps = tuple[list[int], list[int], list[int], int]


class FusableConvolution:
    """A convolution of a graph whose weight is a constant, plain or fused with ReLU and addition."""

    def __init__(self, network: ConvolutionGraph, node: Node) -> None:
        self.network, self.node = network, node
        self.fused = node.target is CONV_RELU
        rest = list(node.args[4 if self.fused else 3 :])
        defaults: list[Any] = [[1, 1], [0, 0], [1, 1], 1]
        steps: list[Any] = [*rest, *defaults[len(rest) :]]
        pairs = [list(each) * (1 if len(each) > 1 else 2) for each in steps[:3]]
        self.steps: Steps = (pairs[0], pairs[1], pairs[2], steps[3])

    # Read from the node each time: rewriting another convolution may replace the inputs of this one.

    @property
    def image(self) -> Node:
        return cast(Node, self.node.args[0])

    @property
    def other(self) -> Node | None:
        """The tensor that is added before the ReLU."""
        return cast("Node | None", self.node.args[3]) if self.fused else None

    @property
    def weight(self) -> Tensor:
        return self.network.value(self.node.args[1])

    @property
    def bias(self) -> Tensor | None:
        return None if self._bias is None else self.network.value(self._bias)

    @property
    def _bias(self) -> Node | None:
        return cast("Node | None", self.node.args[2]) if len(self.node.args) > 2 else None

    @property
    def groups(self) -> int:
        return self.steps[3]

    def replace(
        self,
        place: Node | None = None,
        *,
        image: Node | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        other: Node | None = None,
        steps: Steps | None = None,
        relu: bool | None = None,
    ) -> None:
        """Write a new convolution with the given parts changed and use it in place of `place` (default: this node)."""
        place = place or self.node
        relu = self.fused if relu is None else relu
        network = self.network
        with network.graph.inserting_before(place):
            dtype = network.stored(self.node.args[1]).dtype
            new_weight = self.node.args[1] if weight is None else network.constant(weight, dtype)
            new_bias = self._bias if bias is None else network.constant(bias, dtype)
            added = [other or self.other] if relu else []
            values = (image or self.image, new_weight, new_bias, *added, *(steps or self.steps))
            made = network.graph.call_function(CONV_RELU if relu else CONV, values)
        made.meta = dict(place.meta)
        place.replace_all_uses_with(made)
        network.graph.eliminate_dead_code()


class ConvolutionGraph:
    """A graph of torch.export with its constants, whose `values` are known in a higher precision by name."""

    def __init__(self, module: GraphModule, values: Mapping[str, Tensor]) -> None:
        self.module, self.graph = module, module.graph
        self._values = dict(values)

    def convolutions(self) -> Iterator[FusableConvolution]:
        """Yield the convolutions in order. The graph may be rewritten meanwhile."""
        for node in list(self.graph.nodes):
            found = None if node._erased else self.convolution(node)
            if found is not None:
                yield found

    def convolution(self, node: object) -> FusableConvolution | None:
        """Return `node` as a convolution of a batch of images with constant weights, or None."""
        if not isinstance(node, Node) or node.target not in (CONV, CONV_RELU) or node.kwargs:
            return None
        if not all(each is None or (isinstance(each, Node) and each.op == "get_attr") for each in node.args[1:3]):
            return None
        return FusableConvolution(self, node) if node.meta["val"].dim() == 4 else None

    def value(self, node: object) -> Tensor:
        """Return the value of a constant in the highest precision known."""
        return self._values.get(str(getattr(node, "target", "")), self.stored(node))

    def stored(self, node: object) -> Tensor:
        """Return a constant in its own precision."""
        assert isinstance(node, Node)
        *path, last = str(node.target).split(".")
        return getattr(self.module.get_submodule(".".join(path)), last)

    def constant(self, value: Tensor, dtype: torch.dtype) -> Node:
        """Add a constant at the insertion point of the graph."""
        names = (f"fused_{number}" for number in count(len(self._values)))
        name = next(each for each in names if not hasattr(self.module, each))  # the network may use such a name itself
        self._values[name] = value.detach()
        self.module.register_buffer(name, self._values[name].to(dtype))
        return self.graph.get_attr(name)

    def rebuilt(self) -> GraphModule:
        """Return the module in its present form, without unused constants."""
        self.graph.eliminate_dead_code()
        self.graph.lint()
        made = GraphModule(self.module, self.graph)
        for parameter in made.parameters():
            parameter.requires_grad_(False)
        return made.eval()
