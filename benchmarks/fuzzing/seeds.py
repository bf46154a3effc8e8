"""Undamaged files to mutate: a finished run, weights, a sweep, CIFAR batches, images and shards, made once."""

import functools
import os
import pickle
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from softprune.lab.data.cifar import Cifar

RECIPE = """\
name = "seed"
seed = 3
[model]
name = "digits_net"
[data]
name = "digits"
batch_size = 64
[train]
epochs = 2
threads = 1
[schedule]
kind = "cosine"
[optimizer]
lr = 0.1
momentum = 0.9
[method]
name = "scp"
strength = 0.01
include = ["*"]
[finetune]
epochs = 0
[records]
checkpoint_epochs = 1
"""

SWEEP = """\
name = "seeds"
[grid]
seed = [0, 1]
[[run]]
name = "dense"
recipe = "digits"
set = { "method.name" = "dense", "train.epochs" = 2, "train.dense_baseline" = false }
[[run]]
name = "scp"
recipe = "recipe.toml"
after = "dense"
set = { "model.weights" = "{after}" }
grid = { "method.strength" = [0.01, 0.02] }
"""

CANARY = """\
import pathlib
pathlib.Path("IMPORTED").touch()
def make(num_classes=10, **options):
    raise SystemExit("made")
"""
"""A module in the current folder that no file may name into a process."""


@dataclass(frozen=True)
class Seeds:
    """The folder of the seed files, and the ones that other formats are mixed with."""

    folder: Path
    others: tuple[bytes, ...]

    def copy(self, name: str, work: Path) -> Path:
        """Copy a seed file or folder into ``work`` and return its new path."""
        source, target = self.folder / name, work / name
        if source.is_dir():
            return Path(shutil.copytree(source, target, symlinks=True))
        target.parent.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(source, target))

    @functools.cache  # noqa: B019  (read once, before the children are forked)
    def checkpoints(self) -> "list[dict[str, Any]]":
        """Return the states of the seed run's checkpoints."""
        from softprune.lab.runs.checkpoint import read_checkpoint

        return [read_checkpoint(path) for path in sorted((self.folder / "run" / "checkpoints").glob("step-*"))]


def make_seeds(folder: Path) -> Seeds:
    """Make the seed files in ``folder``, unless they are there."""
    if not (folder / "complete").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "recipe.toml").write_text(RECIPE)
        (folder / "sweep.toml").write_text(SWEEP)
        (folder / "fuzz_canary.py").write_text(CANARY)
        _train(folder)
        _write_weights(folder)
        _write_cifar(folder / "cifar")
        _write_images(folder / "images")
        _write_shards(folder / "images", folder / "shards")
        (folder / "complete").touch()
    names = (
        "recipe.toml",
        "run/result.json",
        "run/metrics.jsonl",
        "run/sessions.jsonl",
        "weights.safetensors",
        "weights.pt",
    )
    return Seeds(folder, tuple((folder / name).read_bytes() for name in names))


def _train(folder: Path) -> None:
    """Train in another process: one that has computed may not fork safely."""
    command = [sys.executable, "-m", "softprune", "train", "recipe.toml", "--out", "run", "--device", "cpu"]
    command += ["--set", "data.holdout=1300"]  # few images are enough
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"The seed run failed with exit code {done.returncode}:\n{done.stderr}")
    # Pages are long and no input.
    (folder / "run" / "report.html").unlink()


def _write_weights(folder: Path) -> None:
    import safetensors.torch
    import torch

    from softprune.models import build

    torch.manual_seed(0)
    state = build("digits_net", 10).state_dict()
    torch.save(state, folder / "weights.pt")
    safetensors.torch.save_file(state, folder / "weights.safetensors")


def small_cifar() -> "Cifar":
    """CIFAR-10 with few images."""
    from softprune.lab.data.cifar import CIFAR10

    return replace(CIFAR10, train_images=10, test_images=2)


def _write_cifar(root: Path) -> None:
    import numpy as np

    cifar = small_cifar()
    folder = root / cifar.folder
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in (*cifar.train_files, *cifar.test_files):
        pixels = rng.integers(0, 256, (2, 3072), dtype=np.uint8)
        content = {b"data": pixels, b"labels": [1, 2], b"batch_label": b"a batch", b"filenames": [b"a.png", b"b.png"]}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    names = [f"class {number}".encode() for number in range(10)]
    (folder / cifar.meta_file).write_bytes(pickle.dumps({b"label_names": names}, protocol=2))


def _write_shards(images: Path, root: Path) -> None:
    from softprune.lab.data.shards import write_shards

    write_shards(images, root, per_shard=4)


def _write_images(root: Path) -> None:
    from PIL import Image

    rng = random.Random(0)
    formats = {"png": "PNG", "jpg": "JPEG", "bmp": "BMP", "webp": "WEBP", "ppm": "PPM", "tiff": "TIFF"}
    for split in ("train", "val"):
        for name in ("ant", "bee"):
            folder = root / split / name
            folder.mkdir(parents=True)
            for suffix, kind in formats.items():
                image = Image.frombytes("RGB", (40, 36), rng.randbytes(40 * 36 * 3))
                image.save(folder / f"image.{suffix}", kind)
    # Not listed as an image, but mixed into others: EPS is decoded by another program.
    Image.frombytes("RGB", (8, 8), rng.randbytes(192)).save(root.parent / "page.eps", "EPS")
