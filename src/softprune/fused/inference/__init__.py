"""Inference kernels beyond pruning, for half precision on NVIDIA GPUs.

Pruning does not shrink what stands around the convolutions of a residual network: the addition of the shortcut and its
ReLU, at the full width of the stream, and the first convolution. These are bound by memory. :func:`fuse` lets cuDNN
apply bias, addition and ReLU while it writes a convolution's output, feeds the first convolution with 2x2 blocks of
pixels, and pads the odd widths that pruning leaves.
"""

from softprune.fused.inference.fuse import fuse as fuse
