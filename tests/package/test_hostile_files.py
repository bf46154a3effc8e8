"""No reader waits for a named pipe, fills the memory from an endless device, or opens what is far too large."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import softprune as sp
from softprune.errors import SoftpruneError
from softprune.lab.config.recipes import load_recipe
from softprune.lab.runs.checkpoint import read_checkpoint
from softprune.lab.runs.folder import RunFolder
from softprune.lab.runs.weights import read_weights
from softprune.lab.sweep import read_sweep


def sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(50 * 2**30)


FILES = {"pipe": os.mkfifo, "device": lambda path: path.symlink_to("/dev/zero"), "sparse": sparse}
READERS: dict[str, Callable[[Path], Any]] = {
    "step-1.ckpt": read_checkpoint,
    "weights.safetensors": read_weights,
    "weights.pt": read_weights,
    "small.safetensors": lambda path: sp.load(path, sp.models.build("digits_net", 10)),
    "recipe.toml": lambda path: load_recipe(str(path)),
    "sweep.toml": lambda path: read_sweep(str(path)),
    "result.json": lambda path: RunFolder(path.parent).read_result(),
}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_ordinary_file_is_refused_by_name(name: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / name
    FILES[kind](path)
    with pytest.raises(SoftpruneError, match=name.partition(".")[0]):
        READERS[name](path)
