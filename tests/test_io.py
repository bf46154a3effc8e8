"""What cannot be read is named."""

from collections.abc import Callable
from pathlib import Path

import pytest

import softprune as sp
from softprune.errors import SoftpruneError
from softprune.io import read_bytes
from softprune.lab.config.recipes import load_recipe
from softprune.lab.data.cifar import read_pickle
from softprune.lab.runs.checkpoint import read_checkpoint, read_newest
from softprune.lab.runs.folder import RunFolder, load_run
from softprune.lab.runs.networks import read_weights
from softprune.lab.sweep import read_sweep

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
    "config.toml": ("config.toml", lambda path: RunFolder(path.parent).read_config()),
    "result.json": ("result.json", lambda path: load_run(path.parent)),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_folder_in_the_place_of_a_file_is_refused_by_name(reader: str, tmp_path: Path) -> None:
    name, read = READERS[reader]
    (tmp_path / name).mkdir()
    with pytest.raises(SoftpruneError, match=str(tmp_path)):
        read(tmp_path / name)
