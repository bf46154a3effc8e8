"""Convolutions of odd widths, as networks have them once they are cut, made fit for tensor cores.

For widths that are no whole multiple cuDNN copies the images, the weights and their gradients to padded ones and back
around every convolution, which takes longer than many of the convolutions. Zeros that the graph itself adds cost next
to nothing: the compiler has the kernel before write them along.
"""

import torch
import torch.nn.functional as F

from softprune.fused.training.nodes import Convolution, layout_of
from softprune.hardware import alignment_padding


def is_odd(convolution: Convolution) -> bool:
    """Whether a width is no whole multiple; the colours of an image are such a width."""
    return any(alignment_padding(width) for width in convolution.widths)


def widen(convolution: Convolution) -> None:
    """Add channels of zeros to whole multiples, and leave them out behind: the same result in value and layout."""
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
        # What follows may rely on the strides that it was traced with; the compiler has no need to copy for that.
        with convolution.graph.inserting_after(kept):
            same = convolution.call(torch.clone, kept, memory_format=layout)
        node.replace_all_uses_with(same, delete_user_cb=lambda user: user is not kept)
