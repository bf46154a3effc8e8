"""BatchNorm recalibration: measure the running statistics of a compact network anew.

While masks are random, each layer's statistics are collected under upstream masks that were drawn, not decided.
A few batches through the network as it was cut replace them by what it really sees.
"""

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from softprune.data.batches import BatchSource
from softprune.distributed import broadcast_from_rank0_
from softprune.masks import Clock
from softprune.module_state import evaluating


@torch.no_grad()
def recalibrate(network: nn.Module, feed: BatchSource, batches: int) -> None:
    """Set every BatchNorm's running statistics to their mean over ``batches`` training batches, in place.

    Several processes must call it together: each sees its share of the batches, and all take the first one's
    statistics, as in training.
    """
    norms = [
        module
        for module in network.modules()
        if isinstance(module, _BatchNorm) and module.track_running_stats
    ]
    momenta = [norm.momentum for norm in norms]
    clock = Clock(feed.sampler.seed, feed.device)
    try:
        with evaluating(network):
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = None  # the cumulative mean
                norm.train()
            for number in range(batches):
                epoch, position = divmod(number, feed.sampler.steps)
                if position == 0:
                    feed.begin(epoch, 0)
                feed.before_step()
                for first, second in feed.pieces(torch.tensor([position], device=feed.device)):
                    network(feed.batch(first, second, clock)[0])
                clock.end_step()
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
    broadcast_from_rank0_(*(buffer for norm in norms for buffer in norm.buffers()))
