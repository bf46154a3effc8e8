"""Networks whose convolutions do what follows them, for PyTorch on NVIDIA GPUs.

Behind a pruned convolution the bias, the shortcut's addition and the ReLU cost as much as before: they are memory, not
arithmetic. cuDNN can do them while the convolution writes its result (:mod:`.epilogues`). What else pruning does not
make smaller is made faster here: the first convolution, which reads three colours (:mod:`.stems`), and widths that are
no whole multiple (:mod:`.widths`).
"""

from softprune.export.fusing.fuse import fuse as fuse
