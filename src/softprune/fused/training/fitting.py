"""A whole graph, its convolutions rewritten."""

import copy

from torch.fx import GraphModule

from softprune.fused.training.nodes import convolutions
from softprune.fused.training.products import is_thin, multiply_out
from softprune.fused.training.statistics import share_statistics, shared_statistics
from softprune.fused.training.widening import is_odd, widen


def fitted(graph: GraphModule) -> GraphModule | None:
    """A copy of a graph of torch.compile whose convolutions suit tensor cores and whose BatchNorms do nothing twice.

    None where there is nothing to do.
    """
    if not shared_statistics(graph) and not any(
        is_thin(each) or is_odd(each) for each in convolutions(graph)
    ):
        return None
    copied = copy.deepcopy(graph)
    share_statistics(copied)
    for each in convolutions(copied):
        if is_thin(each):
            multiply_out(each)
        elif is_odd(each):
            widen(each)
    copied.graph.lint()
    copied.recompile()
    return copied
