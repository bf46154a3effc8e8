"""Recalibrated statistics are the mean over the batches that were shown."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from softprune.data import load_data
from softprune.data.batches import make_batches
from softprune.data.sampler import EpochSampler
from softprune.masks import Clock
from softprune.train.stage import recalibrate


def test_statistics_are_those_of_the_batches() -> None:
    data = load_data("digits")
    sampler = EpochSampler(size=len(data.train), batch_size=200)
    batches = make_batches(data, sampler, device=torch.device("cpu"), accumulate=2)
    network = nn.Sequential(nn.BatchNorm2d(1), nn.Dropout(0.5))
    network.eval()
    norm = network[0]
    norm.running_mean.fill_(99.0)
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


_ONE_OF_TWO = """
import sys
import torch
from softprune.data import load_data
from softprune.data.batches import make_batches
from softprune.train.stage import recalibrate
from softprune.data.sampler import EpochSampler

rank, folder = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
data = load_data("digits")
sampler = EpochSampler(size=len(data.train), batch_size=200, rank=rank, world_size=2)
norm = torch.nn.BatchNorm2d(1)
recalibrate(norm, make_batches(data, sampler, device=torch.device("cpu")), 3)
torch.save(norm.state_dict(), f"{folder}/{rank}.pt")
torch.distributed.destroy_process_group()
"""


def test_processes_end_with_the_same_statistics(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    processes = [
        subprocess.Popen([sys.executable, "-c", _ONE_OF_TWO, str(rank), str(tmp_path)], env=environment)
        for rank in range(2)
    ]
    assert [process.wait(120) for process in processes] == [0, 0]
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first["num_batches_tracked"] == 3
    assert all(torch.equal(first[name], second[name]) for name in first)

    data = load_data("digits")
    share = EpochSampler(size=len(data.train), batch_size=200, rank=0, world_size=2)
    alone = nn.BatchNorm2d(1)
    recalibrate(alone, make_batches(data, share, device=torch.device("cpu")), 3)
    assert torch.equal(first["running_mean"], alone.running_mean)
