"""A trial cut that proves explicit sizes in forward(): do they follow the tensors, or are they literals?"""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import nn

from softprune.graph import ChannelGraph
from softprune.plan import make_plan
from softprune.surgery.apply import apply_plan

logger = logging.getLogger(__name__)


def prove_sizes(graph: ChannelGraph, model: nn.Module) -> ChannelGraph:
    """`graph` with the channels frozen whose width a literal in forward() fixes.

    ``x.view(b, 2, c // 2, h, w)`` and ``x.view(b, 2, 58, h, w)`` look the same to torch.export. So every network
    that reshapes its channels is cut once by way of trial and run on the meta device, where nothing is computed.
    """
    if not graph.suspects or not graph.sites or _survives(graph, model):
        return graph
    for atoms, place in graph.suspects:
        others = graph
        for other, _ in graph.suspects:
            if other is not atoms:
                others = others.freeze(other, "")
        if not _survives(others, model):
            logger.info("sizes in %s are literals: its channels are frozen", place)
            graph = graph.freeze(
                atoms, f"its channels cannot be cut: {place} fixes their number by a literal size"
            )
    return graph


def _survives(graph: ChannelGraph, model: nn.Module) -> bool:
    """Whether a network cut by half at every site still runs."""
    masks = {
        site.name: torch.from_numpy(np.arange(site.width) < max(site.width // 2, 1)) for site in graph.sites
    }
    example = graph.example.map(lambda tensor: tensor.to("meta"))
    try:
        trial = apply_plan(make_plan(graph, model, masks), model).to("meta").eval()
        with torch.no_grad():
            trial(*example.args, **example.kwargs)
    except Exception as error:
        logger.debug("the trial cut failed: %s", error)
        return False
    return True
