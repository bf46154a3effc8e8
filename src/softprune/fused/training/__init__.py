"""Convolutions of a compiled step, rewritten into what GPUs are fast at; their results stay the same but for rounding.

cuDNN is made for wide convolutions whose widths are whole multiples. Of the others, those with very few outputs become
matrix products (:mod:`.products`), and odd widths get zeros beside them (:mod:`.widening`). BatchNorms before them that
read the same channels take their statistics once (:mod:`.statistics`).
"""

from softprune.fused.training.fitting import fitted as fitted
