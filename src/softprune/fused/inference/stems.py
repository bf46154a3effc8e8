"""First convolutions in steps of two, as networks for large images have them: few colours, many pixels.

Tensor cores take channels eight or more at a time, and three colours leave most of each product empty. A convolution in
steps of two reads an image of 2x2 blocks: with each block's pixels as channels it has steps of one, a quarter of the
taps, and four times the channels. Products and sums stay the same.
"""

import torch
import torch.nn.functional as F

from softprune.fused.inference.network import Convolution, Network
from softprune.hardware import IMAGE_CHANNELS, alignment_padding

_aten = torch.ops.aten


def read_in_blocks(network: Network) -> int:
    """Let convolutions of an image's colours in steps of two read 2x2 blocks as pixels; returns how many do."""
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


def _rewrite(convolution: Convolution, size: list[int]) -> None:
    graph, weight = convolution.network.graph, convolution.weight
    # Along each side: zeros around the kernel, until it and the padding before it are whole blocks.
    front = [pad % 2 for pad in convolution.steps[1]]
    taps = [-(-(length + more) // 2) for length, more in zip(weight.shape[2:], front, strict=True)]
    behind = [
        2 * count - length - more for count, length, more in zip(taps, weight.shape[2:], front, strict=True)
    ]
    wide = F.pad(weight, (front[1], behind[1], front[0], behind[0]))
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
        # PyTorch leaves an empty batch as it is there; for any other this does nothing.
        image = graph.call_function(_aten.view.default, (image, [batch, 4 * inputs, *counts]))
        image = graph.call_function(_aten.pad.default, (image, [0, 0, 0, 0, 0, more]))
    steps = ([1, 1], [0, 0], [1, 1], 1)
    convolution.replace(image=image, weight=F.pad(blocks, (0, 0, 0, 0, 0, more)), steps=steps)
