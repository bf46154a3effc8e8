"""Convolutions of single pixels around a wide stream, joined: into it, with its shortcut, and out of it again.

A bottleneck block widens its few channels to those of the stream, adds the shortcut, and the next block narrows them
again. At large images that is memory, not arithmetic: each of the three reads or writes the whole stream. Joined, it is
written once and read by nobody but the next shortcut (:mod:`.pair_kernel`).
"""

import operator
from typing import Any

from torch.fx import Node

from softprune.fused.inference.network import Convolution, Network
from softprune.fused.inference.pair_operator import WIDEN, WIDEN_NARROW

LEAST_PIXELS = 400
"""Of an image: where it is smaller, the stream is, too, and arithmetic is what counts."""
MOST_INSIDE = 64
"""Channels inside of the blocks: with more of them separate kernels for arithmetic are faster (measured on an H200)."""
MOST_SHORTCUT = 384
"""Channels that are read to make the stream, those of the shortcut included."""


def join(network: Network) -> int:
    """Join what is worth it; returns how many kernels there are less."""
    saved = 0
    for convolution in network.convolutions():
        if convolution.other is None or not _is_pointwise(convolution):
            continue
        main, shortcut = _roles(convolution)
        if main.steps[0] != [1, 1]:
            continue
        reader = _reader(convolution.node, main)
        if shortcut is not None or reader is not None:
            _replace(convolution, main, shortcut, reader)
            saved += (shortcut is not None) + (reader is not None)
    return saved


def _is_pointwise(convolution: Convolution) -> bool:
    """Of single pixels, at most every second one, and of images large enough."""
    stride, padding, _, groups = convolution.steps
    kernel = tuple(convolution.weight.shape[2:])
    if kernel != (1, 1) or groups != 1 or padding != [0, 0] or stride not in ([1, 1], [2, 2]):
        return False
    height, width = convolution.node.meta["val"].shape[2:]
    return isinstance(height, int) and isinstance(width, int) and height * width >= LEAST_PIXELS


def _roles(convolution: Convolution) -> tuple[Convolution, Convolution | None]:
    """The convolution that widens, and the one that makes the shortcut, for nobody else.

    Whichever comes last in the graph has the other one's result added to it; the one in steps is the shortcut's.
    """
    other = convolution.network.convolution(convolution.other)
    if other is None or other.fused or other.bias is not None or len(other.node.users) != 1:
        return convolution, None
    if not _is_pointwise(other) or _inputs(convolution) + _inputs(other) > MOST_SHORTCUT:
        return convolution, None
    widening, shortcut = sorted((convolution, other), key=lambda each: (each.steps[0], _inputs(each)))
    return widening, shortcut


def _inputs(convolution: Convolution) -> int:
    return int(convolution.weight.shape[1])


def _reader(stream: Node, main: Convolution) -> Convolution | None:
    """The first convolution that narrows the stream again."""
    if _inputs(main) > MOST_INSIDE:
        return None
    for user in stream.users:
        found = main.network.convolution(user)
        if found is None or not found.fused or found.other is not None or found.steps[0] != [1, 1]:
            continue
        if _is_pointwise(found) and found.weight.shape[0] <= MOST_INSIDE:
            return found
    return None


def _replace(
    convolution: Convolution, main: Convolution, shortcut: Convolution | None, reader: Convolution | None
) -> None:
    graph, place = convolution.network.graph, convolution.node
    bias, other = place.args[2:4]
    with graph.inserting_before(place):
        made: tuple[Any, ...] = (None, None, 1)
        if shortcut is not None:
            other = None
            made = (shortcut.image, shortcut.node.args[1], shortcut.steps[0][0])
        first = (main.image, main.node.args[1], bias)
        if reader is None:
            stream = graph.call_function(WIDEN, (*first, *made))
        else:
            following = [_again(constant) for constant in reader.node.args[1:3]]
            both = graph.call_function(WIDEN_NARROW, (*first, other, *made, *following))
            stream = graph.call_function(operator.getitem, (both, 0))
            narrow = graph.call_function(operator.getitem, (both, 1))
            narrow.meta = dict(reader.node.meta)
            reader.node.replace_all_uses_with(narrow)
    stream.meta = dict(place.meta)
    place.replace_all_uses_with(stream)
    graph.eliminate_dead_code()


def _again(constant: object) -> Node | None:
    """The same constant, read where the graph is being written."""
    assert constant is None or isinstance(constant, Node)
    return None if constant is None else constant.graph.get_attr(str(constant.target))
