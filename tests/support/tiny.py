"""A run so small that a test can have many: a network of the user's own on the digits, seconds in all."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch

from softprune.lab.config.recipes import load_recipe
from softprune.lab.config.settings import RunConfig
from softprune.lab.runs.checkpoint import read_newest
from softprune.lab.train.control import Listener

_NETWORK = """
from torch import nn

def block(inputs, outputs, stride):
    return [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

def tiny(num_classes, channels=1):
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, num_classes)]
    return nn.Sequential(*block(channels, 8, 2), *block(8, 12, 1), *block(12, 16, 2), *head)
"""

_RECIPE = """
[model]
name = "tiny_networks:tiny"
[data]
batch_size = 96
[train]
epochs = 4
threads = 1
[schedule]
kind = "cosine"
[method]
strength = 0.032
[records]
checkpoint_seconds = 0
checkpoint_epochs = 1
"""

TIMES = {"seconds", "images_per_second"}
"""What differs between two runs of the same configuration."""


class StopAt(Listener):
    """Stops a run by SIGTERM, after so many steps."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def on_step(self, done: int) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)


def tiny_recipe(folder: Path) -> Path:
    """Write the network's module and the recipe into ``folder``, from where runs must be started."""
    (folder / "tiny_networks.py").write_text(_NETWORK)
    path = folder / "tiny.toml"
    path.write_text(_RECIPE)
    return path


def tiny_config(folder: Path, *overrides: str) -> RunConfig:
    """The tiny run's configuration."""
    return load_recipe(str(tiny_recipe(folder)), overrides)


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without times."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def final_state(run: Path) -> dict[str, Any]:
    """What the last checkpoint holds of the training itself."""
    state = read_newest(run / "checkpoints")[1]
    history = {key: state["history"][key] for key in ("epoch", "batch", "cuts", "sites")}
    return {"model": state["model"], "stage": state["stage"], **history}


def assert_same(first: Any, second: Any, where: str = "") -> None:
    """Bit for bit, through nested containers."""
    assert type(first) is type(second), where
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second), where
    elif isinstance(first, dict):
        assert first.keys() == second.keys(), where
        for key in first:
            assert_same(first[key], second[key], f"{where}.{key}")
    elif isinstance(first, list | tuple):
        assert len(first) == len(second), where
        for index, pair in enumerate(zip(first, second, strict=True)):
            assert_same(*pair, f"{where}[{index}]")
    else:
        assert first == second, where
