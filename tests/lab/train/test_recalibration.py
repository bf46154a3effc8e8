"""Recalibrated statistics are the mean over the batches that were shown."""

from pathlib import Path

import pytest
import torch
from forked import recalibrate_in_two, recalibrate_on_a_half
from killing import fork_server
from torch import nn

from softprune.lab.data import load_data
from softprune.lab.data.batches import EpochSampler, make_batches
from softprune.lab.train.stage import recalibrate
from softprune.masks import Clock


def test_statistics_are_those_of_the_batches() -> None:
    data = load_data("digits")
    sampler = EpochSampler(size=len(data.train), batch_size=200)
    batches = make_batches(data, sampler, device=torch.device("cpu"), accumulate=2)
    network = nn.Sequential(nn.BatchNorm2d(1), nn.Dropout(0.5), nn.BatchNorm2d(1, track_running_stats=False))
    network.eval()
    norm = network[0]
    norm.running_mean.fill_(99.0)
    norm.num_batches_tracked.fill_(50)
    recalibrate(network, batches, 10)  # more than an epoch of 8 steps

    means, variances = [], []
    clock = Clock(0)
    for number in range(10):
        epoch, position = divmod(number, sampler.steps)
        batches.begin(epoch, 0)
        for micro_batch in batches.micro_batches(torch.tensor([position])):
            images = batches.batch(*micro_batch, clock)[0]
            means.append(images.mean())
            variances.append(images.var())
        clock.end_step()
    torch.testing.assert_close(norm.running_mean[0], torch.stack(means).mean())
    torch.testing.assert_close(norm.running_var[0], torch.stack(variances).mean())
    assert norm.momentum == 0.1
    assert not any(module.training for module in network.modules())


@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("forking")
def test_processes_end_with_the_same_statistics(tmp_path: Path) -> None:
    server = fork_server()
    processes = [server.Process(target=recalibrate_in_two, args=(str(tmp_path), rank)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first["num_batches_tracked"] == 3
    assert all(torch.equal(first[name], second[name]) for name in first)

    alone = nn.BatchNorm2d(1)
    recalibrate_on_a_half(alone, 0)
    assert torch.equal(first["running_mean"], alone.running_mean)
