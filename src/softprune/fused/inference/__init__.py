"""Networks whose convolutions do what follows them, for PyTorch on NVIDIA GPUs.

What pruning does not make smaller stands around the convolutions: the shortcut's addition and its ReLU, at the full
width of the stream, and the first convolution. These are memory, not arithmetic. cuDNN can add a bias and a shortcut
and apply a ReLU while a convolution writes its result (:mod:`.epilogues`); a first convolution of few colours can read
blocks of pixels (:mod:`.stems`); widths that are no whole multiple, which pruning leaves, are filled up
(:mod:`.widths`); and where a stream of large images is widened, added to and narrowed again, all three are one kernel
(:mod:`.pairs`).
"""

from softprune.fused.inference.fuse import fuse as fuse
