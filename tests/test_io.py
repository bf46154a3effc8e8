"""Files of others: a regular file of a sensible size, or an error that names it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import softprune as sp
from softprune.budget.latency import LatencyTable
from softprune.errors import FileFormatError, SoftpruneError
from softprune.io import read_bytes
from softprune.lab.config.recipes import load_recipe
from softprune.lab.data.cifar import read_pickle
from softprune.lab.runs.checkpoint import read_checkpoint, read_newest
from softprune.lab.runs.folder import RunFolder, load_run
from softprune.lab.runs.networks import read_weights
from softprune.lab.sweep import read_sweep


def fifo(path: Path) -> None:
    os.mkfifo(path)  # opening it to read waits for a writer


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")  # which has no end


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(50 * 2**30)  # it takes no room on the disk, and all memory when it is read


def folder(path: Path) -> None:
    path.mkdir()


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "bytes": ("any", read_bytes),
    "recipe": ("recipe.toml", lambda path: load_recipe(str(path))),
    "sweep": ("sweep.toml", lambda path: read_sweep(str(path))),
    "network": ("network.safetensors", lambda path: sp.load(path, sp.models.build("digits_net", 10))),
    "pickle": ("batch", read_pickle),
    "checkpoint": ("step-0000000001.ckpt", read_checkpoint),
    "newest checkpoint": ("step-0000000001.ckpt", lambda path: read_newest(path.parent)),
    "weights.pt": ("weights.pt", read_weights),
    "weights.safetensors": ("weights.safetensors", read_weights),
    "latency table": ("device.json", LatencyTable.read),
    "config.toml": ("config.toml", lambda path: RunFolder(path.parent).read_config()),
    "result.json": ("result.json", lambda path: load_run(path.parent)),
    "metrics.jsonl": ("metrics.jsonl", lambda path: load_run(path.parent)),
}


@pytest.mark.parametrize("make", [fifo, device, sparse, folder])
@pytest.mark.parametrize("reader", READERS)
def test_other_files_are_refused_by_name(reader: str, make: Callable[[Path], None], tmp_path: Path) -> None:
    name, read = READERS[reader]
    make(tmp_path / name)
    with pytest.raises(SoftpruneError, match=str(tmp_path)):
        read(tmp_path / name)


def test_a_file_may_be_as_large_as_the_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1234")
    assert read_bytes(tmp_path / "file", limit=4) == b"1234"
    with pytest.raises(FileFormatError, match="at most 3 bytes"):
        read_bytes(tmp_path / "file", limit=3)
    with pytest.raises(FileFormatError, match="No such file"):
        read_bytes(tmp_path / "none")
    with pytest.raises(FileFormatError, match="embedded null"):
        read_bytes(tmp_path / "a\0b")
