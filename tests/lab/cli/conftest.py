"""Fixtures that run commands in this process, in an empty folder, as in a pipe."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tiny import tiny_config, tiny_recipe
from typer.testing import CliRunner, Result

from softprune.lab.cli.app import app
from softprune.lab.train.run import start

Command = Callable[..., Result]


@pytest.fixture
def softprune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """Return a function that runs a command line. Errors other than softprune's own are raised."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("softprune.lab.train.evaluate.LATENCY_SECONDS", 1e-9)
    tiny_recipe(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, arguments, catch_exceptions=False)

    yield run
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished tiny run with its baseline. Tests must not change it."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        start(tiny_config(folder, "train.epochs=3", "train.dense_baseline=true"), folder / "run")
    return folder / "run"
