"""The compact networks that are kept beside the results are the ones that the results are about."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import softprune as sp
from softprune import models
from softprune.lab.train.from_checkpoint import evaluate_folder

ROOT = Path(__file__).parents[2]
KEPT = sorted((ROOT / "results").glob("*/compact.safetensors"))
DATA = Path(os.environ.get("SOFTPRUNE_DATA", ROOT / "data"))
CLASSES = {"cifar10": 10, "cifar100": 100}
FOLDERS = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}
LARGEST = 5_000_000


def recorded(file: Path) -> dict[str, Any]:
    result = json.loads((file.parent / "result.json").read_text())
    (row,) = (row for row in result["table"] if row["name"] == "compact")
    return {**row, "model": result["model"], "data": result["data"]}


def test_there_are_some() -> None:
    assert {recorded(file)["model"] for file in KEPT} >= {"vgg16", "resnet56"}


@pytest.mark.parametrize("file", KEPT, ids=lambda file: file.parent.name)
def test_a_kept_network_loads_and_is_the_recorded_one(file: Path) -> None:
    row = recorded(file)
    network = sp.load(file, models.build(row["model"], CLASSES[row["data"]]))
    found = sp.cost(network, torch.randn(1, 3, 32, 32))
    assert (found.params, found.macs) == (row["params"], row["macs"])
    weights = safetensors.torch.save(safetensors.torch.load_file(file))  # the record counts them without the plan
    assert len(weights) == pytest.approx(row["file_bytes"], abs=64)
    assert row["file_bytes"] < LARGEST


@pytest.mark.parametrize("file", KEPT, ids=lambda file: file.parent.name)
def test_a_kept_network_is_as_accurate_as_recorded(file: Path) -> None:
    data = recorded(file)["data"]
    if not (DATA / FOLDERS[data]).is_dir():
        pytest.skip(f"{data} is not here (SOFTPRUNE_DATA)")
    totals = evaluate_folder(file, device="cpu", data_dir=str(DATA))["compact"]
    # Recorded on a GPU in bfloat16, which moves single images.
    assert totals.top1 == pytest.approx(recorded(file)["top1"], abs=0.1)
