"""What the processes run that tests fork from a server."""

import os
import sys
from pathlib import Path

import torch
from dying import Death, FileOperations
from tiny import tiny_config
from torch import nn

import softprune
from softprune.export import to_onnx
from softprune.lab.cli import main
from softprune.lab.config.recipes import load_recipe
from softprune.lab.report import render_run
from softprune.lab.runs.folder import RunFolder
from softprune.lab.train import evaluate
from softprune.lab.train.run import resume, start

# Tracing imports a thousand modules when it is first used: once here, in the server, not in every child.
torch.export.export(nn.Identity(), (torch.zeros(1),))
evaluate.LATENCY_SECONDS = 1e-9


def run_command(folder: str, arguments: tuple[str, ...], out: str) -> None:
    """`softprune ARGUMENTS` in ``folder``, which writes to the file ``out``."""
    os.chdir(folder)
    output = os.open(out, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.stdout, sys.stderr = (open(descriptor, "w", closefd=False) for descriptor in (1, 2))  # noqa: SIM115
    sys.argv = ["softprune", *arguments]
    sys.path.insert(0, "")
    main()


def command_in_two(folder: str, arguments: tuple[str, ...], out: str, rank: int, port: int) -> None:
    """`softprune ARGUMENTS` on one of two nodes of one process each, as torchrun would set them up."""
    _join_two(rank, port, local_rank=0)
    run_command(folder, arguments, out)


def _join_two(rank: int, port: int, local_rank: int) -> None:
    world = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in world.items()})


def train_or_resume_in_two(work: str, name: str, rank: int, port: int, time_limit: float | None) -> None:
    """One of two processes that start the run ``name`` or resume it, as torchrun would set them up."""
    os.chdir(work)
    _join_two(rank, port, local_rank=rank)
    path = Path(name)
    if (path / "config.toml").exists():
        resume(path, time_limit=time_limit)
    else:
        start(load_recipe("tiny.toml"), path, time_limit=time_limit)  # which the test wrote, once for both


def perform(action: str, work: str, name: str, death: Death | None, counts: str, overrides: tuple[str, ...]) -> None:
    """Perform an action on the folder ``name`` of ``work``, and die at ``death``.

    A process that lives to the end writes how many file operations it performed to the file ``counts``.
    """
    os.chdir(work)
    sys.path.insert(0, work)  # where the network's module is
    operations = FileOperations(Path(name), death)
    operations.install()
    _ACTIONS[action](Path(name), overrides)
    operations.write_counts(counts)


def _train(path: Path, overrides: tuple[str, ...]) -> None:
    if (path / "config.toml").exists():
        resume(path)
    else:
        settings = ("train.epochs=4", "records.checkpoint_epochs=1", *overrides)
        start(tiny_config(Path(), *settings), path)


def _compact() -> nn.Module:
    """Return the network of the undisturbed run in the current folder."""
    from tiny_networks import tiny  # type: ignore[import-not-found]

    return softprune.load(RunFolder("trained").compact, tiny(10))


def _save(path: Path, overrides: tuple[str, ...]) -> None:
    softprune.save(_compact(), path / "network.safetensors")


def _export(path: Path, overrides: tuple[str, ...]) -> None:
    to_onnx(_compact(), torch.zeros(1, 1, 8, 8), path / "network.onnx")


def _report(path: Path, overrides: tuple[str, ...]) -> None:
    render_run(path)


_ACTIONS = {"train": _train, "finetune": _train, "save": _save, "export": _export, "report": _report}
