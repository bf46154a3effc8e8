"""Recalibrated statistics are the mean over the batches that were shown."""

import torch
from torch import nn

from softprune.data import load_data
from softprune.masks import Clock
from softprune.train.feed import make_feed
from softprune.train.recalibration import recalibrate
from softprune.train.sampler import EpochSampler


def test_statistics_are_those_of_the_batches() -> None:
    data = load_data("digits")
    sampler = EpochSampler(size=len(data.train), batch_size=200)
    feed = make_feed(data, sampler, device=torch.device("cpu"), pieces=2)
    network = nn.Sequential(nn.BatchNorm2d(1), nn.Dropout(0.5))
    network.eval()
    norm = network[0]
    norm.running_mean.fill_(99.0)
    recalibrate(network, feed, 10)  # more than an epoch of 8 steps

    means, variances = [], []
    clock = Clock(0)
    for number in range(10):
        epoch, position = divmod(number, sampler.steps)
        feed.begin(epoch, 0)
        for piece in feed.pieces(torch.tensor([position])):
            images = feed.batch(*piece, clock)[0]
            means.append(images.mean())
            variances.append(images.var())
        clock.end_step()
    torch.testing.assert_close(norm.running_mean[0], torch.stack(means).mean())
    torch.testing.assert_close(norm.running_var[0], torch.stack(variances).mean())
    assert norm.momentum == 0.1
    assert not any(module.training for module in network.modules())
