"""The graph that is being fused: its convolutions, its constants, and how to put others in their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from softprune.fused.inference.operator import CONV_RELU

CONV = torch.ops.aten.conv2d.default

Steps = tuple[list[int], list[int], list[int], int]


class Convolution:
    """A convolution of a graph, alone or with what follows it, whose weight is a constant."""

    def __init__(self, network: Network, node: Node) -> None:
        self.network, self.node = network, node
        self.fused = node.target is CONV_RELU
        rest = list(node.args[4 if self.fused else 3 :])
        defaults: list[Any] = [[1, 1], [0, 0], [1, 1], 1]
        steps: list[Any] = [*rest, *defaults[len(rest) :]]
        pairs = [list(each) * (1 if len(each) > 1 else 2) for each in steps[:3]]
        self.steps: Steps = (pairs[0], pairs[1], pairs[2], steps[3])

    # Read from the node each time: rewriting another convolution may replace what this one reads.

    @property
    def image(self) -> Node:
        """What is convolved."""
        found = self.node.args[0]
        assert isinstance(found, Node)
        return found

    @property
    def other(self) -> Node | None:
        """What is added."""
        found = self.node.args[3] if self.fused else None
        assert found is None or isinstance(found, Node)
        return found

    @property
    def weight(self) -> Tensor:
        """The constant that it is convolved with."""
        return self.network.value(self.node.args[1])

    @property
    def bias(self) -> Tensor | None:
        """The constant that is added, if there is one."""
        return None if self._bias is None else self.network.value(self._bias)

    @property
    def _bias(self) -> Node | None:
        found = self.node.args[2] if len(self.node.args) > 2 else None
        assert found is None or isinstance(found, Node)
        return found

    @property
    def groups(self) -> int:
        """Of channels that do not mix."""
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
        """Write this convolution anew with what is given, and let it stand for `place` (for itself)."""
        place = place or self.node
        relu = self.fused if relu is None else relu
        network = self.network
        with network.graph.inserting_before(place):
            new_image = image or self.image
            dtype = network.stored(self.node.args[1]).dtype
            new_weight = self.node.args[1] if weight is None else network.constant(weight, dtype)
            new_bias = self._bias if bias is None else network.constant(bias, dtype)
            new_steps = steps or self.steps
            if relu:
                values: tuple[Any, ...] = (new_image, new_weight, new_bias, other or self.other, *new_steps)
            else:
                values = (new_image, new_weight, new_bias, *new_steps)
            made = network.graph.call_function(CONV_RELU if relu else CONV, values)
        made.meta = dict(place.meta)
        place.replace_all_uses_with(made)
        network.graph.eliminate_dead_code()


class Network:
    """A graph of torch.export with its constants.

    Args:
        module: The graph.
        values: More exact values of the constants that it has, by name.
    """

    def __init__(self, module: GraphModule, values: Mapping[str, Tensor]) -> None:
        self.module, self.graph = module, module.graph
        self._values = dict(values)
        self._made = 0

    def convolutions(self) -> Iterator[Convolution]:
        """All of them, in order; the graph may be rewritten meanwhile."""
        for node in list(self.graph.nodes):
            found = None if node._erased else self.convolution(node)
            if found is not None:
                yield found

    def convolution(self, node: object) -> Convolution | None:
        """The convolution on images in batches that `node` is, if it is one and its weights are constants."""
        if not isinstance(node, Node) or node.target not in (CONV, CONV_RELU) or node.kwargs:
            return None
        if not all(
            each is None or (isinstance(each, Node) and each.op == "get_attr") for each in node.args[1:3]
        ):
            return None
        return Convolution(self, node) if node.meta["val"].dim() == 4 else None

    def value(self, node: object) -> Tensor:
        """What a node that reads a constant reads, as exactly as it is known."""
        return self._values.get(str(getattr(node, "target", "")), self.stored(node))

    def stored(self, node: object) -> Tensor:
        """The constant itself, in its precision."""
        assert isinstance(node, Node)
        *path, last = str(node.target).split(".")
        found: Tensor = getattr(self.module.get_submodule(".".join(path)), last)
        return found

    def constant(self, value: Tensor, dtype: torch.dtype) -> Node:
        """A new constant, written where the graph is being written."""
        name = f"fused_{self._made}"
        while hasattr(self.module, name):  # a network may have such names of its own
            self._made += 1
            name = f"fused_{self._made}"
        self._values[name] = value.detach()
        self.module.register_buffer(name, self._values[name].to(dtype))
        return self.graph.get_attr(name)

    def take_any_memory_order(self) -> None:
        """An export fixes a flattening as a view, which images in another order than the example's have none of."""
        for node in self.graph.nodes:
            if node.target is torch.ops.aten.view.default:
                node.target = torch.ops.aten.reshape.default

    def to_channels_last(self) -> None:
        """Put the weights of convolutions into that order, and nothing else."""
        for convolution in self.convolutions():
            weight = self.stored(convolution.node.args[1])
            weight.data = weight.data.contiguous(memory_format=torch.channels_last)

    def rebuilt(self) -> GraphModule:
        """The module as it is now, without the constants that are no longer read."""
        self.graph.eliminate_dead_code()
        self.graph.lint()
        made = GraphModule(self.module, self.graph)
        for parameter in made.parameters():
            parameter.requires_grad_(False)
        return made.eval()
