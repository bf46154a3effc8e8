"""relu(conv(x)) and relu(conv(x) + shortcut) as one operator."""

from typing import TypeGuard

import torch
from torch.fx import Node

from softprune.fused.inference.network import Convolution, Network

_RELU = torch.ops.aten.relu.default
_ADD = torch.ops.aten.add.Tensor


def take_along(network: Network) -> int:
    """Give convolutions the addition and the ReLU that are their only readers; returns how many took something."""
    taken = 0
    for relu in [node for node in network.graph.nodes if node.target is _RELU]:
        source = relu.args[0]
        if _is_sum(source):
            taken += _take_sum(network, relu, source)
            continue
        convolution = _alone(network, source)
        if convolution is not None:
            convolution.replace(relu, relu=True)
            taken += 1
    return taken


def _take_sum(network: Network, relu: Node, add: Node) -> int:
    terms = [term for term in add.args if isinstance(term, Node)]
    if len(set(terms)) != 2 or not _alike(*terms):
        return 0
    # Of two convolutions the later one adds, so that the other's result is there.
    order = {node: place for place, node in enumerate(network.graph.nodes)}
    terms.sort(key=order.__getitem__, reverse=True)
    for term, other in (terms, reversed(terms)):
        convolution = _alone(network, term)
        if convolution is None:
            continue
        # A shortcut's bias would be an operation of its own; here it is part of the other one's.
        bias = convolution.bias
        shortcut = _alone(network, other)
        if shortcut is not None and shortcut.bias is not None:
            bias = shortcut.bias if bias is None else bias + shortcut.bias
            other.update_arg(2, None)
        convolution.replace(relu, bias=bias, other=other, relu=True)
        return 1
    return 0


def _alone(network: Network, node: object) -> Convolution | None:
    """The plain convolution that `node` is, if all that reads it is one operator.

    Convolutions of each channel by itself stay: PyTorch has kernels of its own for them.
    """
    found = network.convolution(node)
    if found is None or found.fused or len(found.node.users) != 1:
        return None
    return None if found.groups > 1 and found.weight.shape[1] == 1 else found


def _alike(left: Node, right: Node) -> bool:
    left_value, right_value = left.meta["val"], right.meta["val"]
    return bool(left_value.shape == right_value.shape and left_value.dtype == right_value.dtype)


def _is_sum(node: object) -> TypeGuard[Node]:
    return isinstance(node, Node) and node.target is _ADD and not node.kwargs and len(node.users) == 1
