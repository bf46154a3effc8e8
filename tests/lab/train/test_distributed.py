"""Two gloo processes against one process that normalises each half of the batch by itself."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forked import command_in_two, train_or_resume_in_two
from killing import fork_server
from tiny import assert_same, final_state, metrics, tiny_config, tiny_recipe

from softprune.lab.config.settings import RunConfig
from softprune.lab.data import EpochSampler, load_data
from softprune.lab.runs.checkpoint import read_newest
from softprune.lab.runs.folder import RunFolder
from softprune.lab.runs.networks import starting_network
from softprune.lab.train.evaluate import Evaluator
from softprune.lab.train.method import make_pruner
from softprune.lab.train.run import resume
from softprune.lab.train.step import learning_rate, make_optimizer
from softprune.lab.world import World
from softprune.rng import Clock


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def reference(config: RunConfig) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """One process, two halves: each normalised by itself, same noise, running statistics of the first half."""
    data = load_data("digits")
    model = starting_network(config.model, data.num_classes, config.seed)[0]
    pruner = make_pruner(config, model, data.example(), total_steps=120)
    optimizer = make_optimizer(config.optimizer, pruner.parameter_groups(weight_decay=config.optimizer.weight_decay))
    pruner.attach(optimizer)
    sampler = EpochSampler(size=len(data.train), batch_size=config.data.batch_size, seed=config.seed)
    batches = data.batches(sampler, torch.device("cpu"))
    rate = learning_rate(config, sampler.steps)
    clock = Clock(config.seed)  # of the images
    pruner.strength.fill_(config.method.strength)
    rows = []
    for epoch in range(config.train.epochs):
        batches.begin(epoch, 0)
        model.train()
        total = 0.0
        for position in range(sampler.steps):
            step = epoch * sampler.steps + position
            optimizer.param_groups[0]["lr"].fill_(rate(step))
            optimizer.zero_grad()
            batch = batches.batch(torch.tensor([position]), clock)
            halves = zip(*(part.chunk(2) for part in batch), strict=True)
            for half, (images, labels) in enumerate(halves):
                if half == 1:
                    buffers = {name: value.clone() for name, value in model.named_buffers()}
                    pruner.clock.forward.zero_()
                task = F.cross_entropy(model(images), labels)
                (pruner.loss(task) / 2).backward()
                total += task.item() / 2 / sampler.steps
            with torch.no_grad():
                for name, value in model.named_buffers():
                    value.copy_(buffers[name])
            optimizer.step()
            clock.end_step()
        rows.append(
            {"train_loss": total, "test_loss": Evaluator(data, config, World(0, 1, torch.device("cpu")))(model).loss}
        )
    return rows, pruner.masks()


@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("forking")
def test_two_processes_train_like_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    config = tiny_config(tmp_path)
    printed, port = [tmp_path / "first", tmp_path / "second"], free_port()
    command = ("train", "tiny.toml", "--out", "two")
    run_together([(command_in_two, (str(tmp_path), command, str(printed[rank]), rank, port)) for rank in range(2)])
    assert ["epoch 1/4" in path.read_text() for path in printed] == [True, False], "one process speaks"
    rows, masks = reference(config)
    torch.set_num_threads(threads)
    for ours, theirs in zip(metrics(tmp_path / "two"), rows, strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-5)
        assert ours["test_loss"] == pytest.approx(theirs["test_loss"], rel=1e-5)
    result = json.loads((tmp_path / "two" / "result.json").read_text())
    assert {site["name"]: site["kept"] for site in result["sites"]} == {n: int(m.sum()) for n, m in masks.items()}
    assert 0 < sum(site["kept"] for site in result["sites"]) < 36
    assert result["environment"]["processes"] == 2


ODD_NETWORK = """
import os
from torch import nn

class Odd(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16)
        self.again = nn.BatchNorm2d(16, momentum=1.0)
        self.last, self.head = nn.Conv2d(16, 8, 3, 2, 1), nn.Linear(8, num_classes)
        self.unused = nn.Linear(8, num_classes)

    def forward(self, x):
        x = self.norm(self.conv(x)).relu()
        if self.training and os.environ["RANK"] == "1":
            x = x - 5
        return self.head(self.last(self.again(x).relu()).relu().mean((2, 3)))
"""


@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("forking")
def test_processes_cut_alike_and_have_parameters_without_gradients(tmp_path: Path) -> None:
    """Dead channels become constants whose sign depends on running statistics, which differ between processes."""
    tiny_recipe(tmp_path)
    (tmp_path / "odd.py").write_text(ODD_NETWORK)
    settings = ("model.name=odd:Odd", "train.compact_at=2", "records.eval_epochs=9", 'method.exclude=["again"]')
    command, port = ["train", "tiny.toml", "--out", "run", "--epochs", "3"], free_port()
    for setting in (*settings, "finetune.epochs=1", "finetune.lr=0.01"):
        command += ["--set", setting]
    run_together(
        [(command_in_two, (str(tmp_path), tuple(command), str(tmp_path / f"out{rank}"), rank, port)) for rank in (0, 1)]
    )
    assert metrics(tmp_path / "run")[-1]["phase"] == "finetune"
    assert len(read_newest(tmp_path / "run" / "checkpoints")[1]["history"]["cuts"]) == 2


@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("forking")
def test_two_processes_stop_and_go_on_together(tmp_path: Path) -> None:
    tiny_recipe(tmp_path)
    in_two(tmp_path, "whole")
    in_two(tmp_path, "pieces", time_limit=0.0)
    assert not (tmp_path / "pieces" / "result.json").exists()
    assert read_newest(tmp_path / "pieces" / "checkpoints")[1]["history"]["batch"] == 10
    in_two(tmp_path, "pieces")
    assert metrics(tmp_path / "pieces") == metrics(tmp_path / "whole")
    assert_same(final_state(tmp_path / "pieces"), final_state(tmp_path / "whole"))


@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("forking")
def test_another_number_of_processes_keeps_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_recipe(tmp_path)
    in_two(tmp_path, "run", time_limit=0.0)
    stopped = read_newest(tmp_path / "run" / "checkpoints")[1]
    resume(tmp_path / "run", device="cpu")
    result = RunFolder(tmp_path / "run").read_result()
    assert (stopped["history"]["batch"], result.environment.processes) == (10, 2), "those of the first process"
    # Neither the steps of an epoch nor the images of a step change.
    assert [row.step for row in result.epochs] == [15, 30, 45, 60]


def in_two(work: Path, name: str, time_limit: float | None = None) -> None:
    """The tiny run in two processes. Only the first has the time limit: it must stop both."""
    port = free_port()
    limits = (time_limit, None)
    run_together([(train_or_resume_in_two, (str(work), name, rank, port, limits[rank])) for rank in range(2)])


def run_together(calls: list[tuple[Callable[..., None], tuple[Any, ...]]], code: int = 0) -> None:
    """Run each call in a process of its own, which must exit with ``code``."""
    server = fork_server()
    processes = [server.Process(target=function, args=arguments) for function, arguments in calls]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == code
