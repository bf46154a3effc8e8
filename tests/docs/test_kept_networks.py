"""The networks that are kept beside the results are the ones that the results are about."""

import csv
import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import softprune as sp
from softprune import models

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
KEPT = sorted(RESULTS.glob("*/compact.safetensors"))
DATA = Path(os.environ.get("SOFTPRUNE_DATA", ROOT / "data"))
SETS = {
    "cifar10": ("cifar-10-batches-py/test_batch", b"labels", (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)),
    "cifar100": ("cifar-100-python/test", b"fine_labels", (129.3, 124.1, 112.4), (68.2, 65.4, 70.4)),
}
"""File of the test images, name of the labels, mean and deviation of each channel."""
CLASSES = {"cifar10": 10, "cifar100": 100}


def recorded(file: Path) -> dict[str, Any]:
    result = json.loads((file.parent / "result.json").read_text())
    (row,) = (row for row in result["table"] if row["name"] == "compact")
    return {**row, "model": result["model"], "data": result["data"]}


def network(file: Path) -> torch.nn.Module:
    row = recorded(file)
    return sp.load(file, models.build(row["model"], CLASSES[row["data"]])).float()


@pytest.mark.parametrize("file", KEPT, ids=lambda file: file.parent.name)
def test_a_kept_network_loads_and_is_the_recorded_one(file: Path) -> None:
    row, found = recorded(file), sp.cost(network(file), torch.randn(1, 3, 32, 32))
    assert (found.params, found.macs) == (row["params"], row["macs"])


@pytest.mark.parametrize("file", KEPT, ids=lambda file: file.parent.name)
def test_a_kept_network_is_as_accurate_as_recorded(file: Path) -> None:
    row = recorded(file)
    name, labels, mean, std = SETS[row["data"]]
    if not (DATA / name).is_file():
        pytest.skip(f"{row['data']} is not here (SOFTPRUNE_DATA)")
    with (DATA / name).open("rb") as stream:
        content = pickle.load(stream, encoding="bytes")
    images = torch.from_numpy(np.asarray(content[b"data"])).view(-1, 3, 32, 32).float()
    images = (images - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    loaded, truth = network(file), torch.tensor(content[labels])
    with torch.inference_mode():
        guesses = torch.cat([loaded(batch).argmax(1) for batch in images.split(500)])
    # Recorded on a GPU in bfloat16, and kept in float16, which moves single images.
    assert 100 * (guesses == truth).float().mean() == pytest.approx(row["top1"], abs=0.05)


def test_what_is_kept_is_small_and_listed() -> None:
    files = [file for file in RESULTS.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 15_000_000
    assert all(file.stat().st_size <= 60_000 for file in files if file.name == "result.json")
    listed = {row["folder"] for row in csv.DictReader((RESULTS / "runs.csv").read_text().splitlines())} - {""}
    assert listed == {file.parent.relative_to(RESULTS).as_posix() for file in files if file.name == "result.json"}
