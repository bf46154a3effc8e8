"""Runs of the tests start from a folder of their own, on one CPU thread."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for `tiny`

from tiny import tiny_config

from softprune.train.config import RunConfig


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RunConfig]]:
    """Makes configurations of a tiny run, in a folder that has the network's module."""
    threads = torch.get_num_threads()
    monkeypatch.chdir(tmp_path)
    yield lambda *overrides: tiny_config(tmp_path, *overrides)
    torch.set_num_threads(threads)


@pytest.fixture
def forking(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests with a fork server: it imports what its children need from where PYTHONPATH says."""
    here = Path(__file__).parent
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", f"{here.parents[1] / 'src'}{os.pathsep}{here}")
