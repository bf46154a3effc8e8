"""The three rewrites of a fused network: epilogues, first convolutions, odd widths."""

from collections.abc import Iterator
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch.fx import Node

from softprune.fused.inference.convolutions import ConvolutionGraph, FusableConvolution
from softprune.hardware import IMAGE_CHANNELS, alignment_padding

_aten = torch.ops.aten
_RELU = torch.ops.aten.relu.default
_ADD = torch.ops.aten.add.Tensor


def fuse_epilogues(network: ConvolutionGraph) -> int:
    """Fuse convolutions with the addition and the ReLU that alone read them. Return their number."""
    taken = 0
    for relu in [node for node in network.graph.nodes if node.target is _RELU]:
        source = relu.args[0]
        if _is_sum(source):
            taken += _fuse_sum(network, relu, source)
            continue
        convolution = _read_once(network, source)
        if convolution is not None:
            convolution.replace(relu, relu=True)
            taken += 1
    return taken


def _fuse_sum(network: ConvolutionGraph, relu: Node, add: Node) -> int:
    terms = [term for term in add.args if isinstance(term, Node)]
    if len(set(terms)) != 2 or not _same_shape(*terms):
        return 0
    # The later of two convolutions adds, because the result of the other one is available then.
    order = {node: place for place, node in enumerate(network.graph.nodes)}
    terms.sort(key=order.__getitem__, reverse=True)
    for term, other in (terms, reversed(terms)):
        convolution = _read_once(network, term)
        if convolution is None:
            continue
        # The bias of the shortcut would need a kernel of its own. Add it to the bias of this convolution.
        bias = convolution.bias
        shortcut = _read_once(network, other)
        if shortcut is not None and shortcut.bias is not None:
            bias = shortcut.bias if bias is None else bias + shortcut.bias
            other.update_arg(2, None)
        convolution.replace(relu, bias=bias, other=other, relu=True)
        return 1
    return 0


def _read_once(network: ConvolutionGraph, node: object) -> FusableConvolution | None:
    """Return `node` as a plain convolution if exactly one operator reads it.

    Depthwise convolutions are left alone: PyTorch has special kernels for them.
    """
    found = network.convolution(node)
    if found is None or found.fused or len(found.node.users) != 1:
        return None
    return None if found.groups > 1 and found.weight.shape[1] == 1 else found


def _same_shape(left: Node, right: Node) -> bool:
    left_value, right_value = left.meta["val"], right.meta["val"]
    return bool(left_value.shape == right_value.shape and left_value.dtype == right_value.dtype)


def _is_sum(node: object) -> TypeGuard[Node]:
    return isinstance(node, Node) and node.target is _ADD and not node.kwargs and len(node.users) == 1


def read_in_blocks(network: ConvolutionGraph) -> int:
    """Let first convolutions of stride two read 2x2 blocks of pixels as channels. Return the number of convolutions.

    Tensor cores process channels in groups of eight, and three colours leave most of a group empty. With each 2x2 block
    as one pixel of four times the channels the stride is one and the kernel has a quarter of the taps. Products and
    sums stay the same.
    """
    done = 0
    for convolution in network.convolutions():
        stride, _, dilation, groups = convolution.steps
        inputs, *kernel = convolution.weight.shape[1:]
        size = convolution.image.meta["val"].shape[2:]
        if (stride, dilation, groups) != ([2, 2], [1, 1], 1) or inputs > IMAGE_CHANNELS or min(kernel) < 3:
            continue
        if not all(isinstance(length, int) for length in size):
            continue
        _rewrite(convolution, [int(length) for length in size])
        done += 1
    return done


def _rewrite(convolution: FusableConvolution, size: list[int]) -> None:
    graph, weight = convolution.network.graph, convolution.weight
    # Pad the kernel with zeros until kernel and leading padding consist of whole blocks.
    front = [pad % 2 for pad in convolution.steps[1]]
    taps = [-(-(length + more) // 2) for length, more in zip(weight.shape[2:], front, strict=True)]
    after = [2 * count - length - more for count, length, more in zip(taps, weight.shape[2:], front, strict=True)]
    wide = F.pad(weight, (front[1], after[1], front[0], after[0]))
    outputs, inputs = weight.shape[:2]
    blocks = wide.view(outputs, inputs, taps[0], 2, taps[1], 2).permute(0, 1, 3, 5, 2, 4)
    blocks = blocks.reshape(outputs, 4 * inputs, *taps)
    more = alignment_padding(4 * inputs)
    result = convolution.node.meta["val"].shape[2:]
    counts = [int(length) + count - 1 for length, count in zip(result, taps, strict=True)]
    edges = []
    for side in (1, 0):
        before = convolution.steps[1][side] + front[side]
        edges += [before, 2 * counts[side] - size[side] - before]
    with graph.inserting_before(convolution.node):
        batch = graph.call_function(_aten.sym_size.int, (convolution.image, 0))
        image = graph.call_function(_aten.pad.default, (convolution.image, edges))
        image = graph.call_function(_aten.pixel_unshuffle.default, (image, 2))
        # pixel_unshuffle does not reshape an empty batch. For other batches this view does nothing.
        image = graph.call_function(_aten.view.default, (image, [batch, 4 * inputs, *counts]))
        image = graph.call_function(_aten.pad.default, (image, [0, 0, 0, 0, 0, more]))
    steps = ([1, 1], [0, 0], [1, 1], 1)
    convolution.replace(image=image, weight=F.pad(blocks, (0, 0, 0, 0, 0, more)), steps=steps)


ZEROS_STAY = (_aten.relu.default, _aten.max_pool2d.default, _aten.avg_pool2d.default, _aten.clone.default)
"""Operators that map a channel of zeros to zeros. Dropout in eval mode is a clone."""


def pad_odd_widths(network: ConvolutionGraph) -> int:
    """Pad odd widths between convolutions to multiples of eight. Return the number of padded widths.

    Only between convolutions: one writes zeros to the added channels, and those that read them multiply by zero.
    """
    done = 0
    while (found := next(_odd(network), None)) is not None:
        convolution, readers = found
        more = alignment_padding(convolution.weight.shape[0])
        for reader in readers:
            reader.replace(weight=F.pad(reader.weight, (0, 0, 0, 0, 0, more)))
        bias = convolution.bias
        convolution.replace(
            weight=F.pad(convolution.weight, (0, 0, 0, 0, 0, 0, 0, more)),
            bias=None if bias is None else F.pad(bias, (0, more)),
        )
        done += 1
    return done


def _odd(network: ConvolutionGraph) -> Iterator[tuple[FusableConvolution, list[FusableConvolution]]]:
    """Yield convolutions of odd width that only convolutions read, with these readers."""
    for convolution in network.convolutions():
        if alignment_padding(convolution.weight.shape[0]) and convolution.groups == 1 and convolution.other is None:
            readers = _readers(network, convolution.node)
            if readers:
                yield convolution, readers


def _readers(network: ConvolutionGraph, node: Node) -> list[FusableConvolution]:
    """Return the convolutions that read `node`, or an empty list if anything else reads it."""
    found = []
    for user in node.users:
        if user.target in ZEROS_STAY:
            further = _readers(network, user)
            if not further:
                return []
            found += further
            continue
        reader = network.convolution(user)
        if reader is None or reader.groups != 1 or reader.image is not node or reader.other is node:
            return []
        found.append(reader)
    return found
