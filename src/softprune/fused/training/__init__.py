"""Rewrites of a compiled training step for tensor cores. Results stay the same up to rounding.

cuDNN is fast for wide convolutions whose widths are multiples of eight. Convolutions with very few outputs become
matrix products (:mod:`.products`), odd widths are padded with zeros (:mod:`.convolutions`), and BatchNorms that read
the same channels share their statistics (:mod:`.statistics`).
"""

import copy

from torch.fx import GraphModule

from softprune.fused.training.convolutions import convolutions, is_odd, pad_to_multiple
from softprune.fused.training.products import is_thin, replace_by_product
from softprune.fused.training.statistics import share_statistics, shared_statistics


def rewrite_graph(graph: GraphModule) -> GraphModule | None:
    """Return a rewritten copy of a graph of torch.compile, or None where there is nothing to rewrite."""
    if not shared_statistics(graph) and not any(is_thin(each) or is_odd(each) for each in convolutions(graph)):
        return None
    copied = copy.deepcopy(graph)
    share_statistics(copied)
    for each in convolutions(copied):
        if is_thin(each):
            replace_by_product(each)
        elif is_odd(each):
            pad_to_multiple(each)
    copied.graph.lint()
    copied.recompile()
    return copied
