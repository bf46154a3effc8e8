"""The page beside Torch-Pruning is in step with its record, and softprune is never behind on a line."""

import importlib
import json
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch

pytestmark = pytest.mark.skipif(
    None in (find_spec("torchvision"), find_spec("timm")), reason='the extras "vision" and "timm" are not installed'
)


@pytest.fixture(scope="module")
def beside() -> ModuleType:
    return importlib.import_module("beside_torch_pruning")


@pytest.fixture(scope="module")
def record(beside: ModuleType) -> dict:
    return json.loads(beside.RECORD.read_text(encoding="utf-8"))


def test_the_page_is_rendered_from_the_record(beside: ModuleType, record: dict) -> None:
    own = json.loads(beside.OWN_DECISIONS.read_text(encoding="utf-8"))
    assert beside.DOCUMENT.read_text(encoding="utf-8") == beside.render(record, own)


def test_own_decisions_meet_their_macs(beside: ModuleType) -> None:
    rows = json.loads(beside.OWN_DECISIONS.read_text(encoding="utf-8"))["rows"]
    assert len(rows) == 54
    assert all(row["target"] * 0.95 < row["macs_kept"] <= row["target"] for row in rows)


def test_softprune_is_never_behind(beside: ModuleType, record: dict) -> None:
    assert [(row["source"], row["name"]) for row in record["rows"]] == beside.NETWORKS
    assert len(record["rows"]) >= 20
    assert record["torch_pruning"] == "1.6.1"
    for row in record["rows"]:
        assert row["softprune"]["status"] == "exact", row["name"]
    # What the comparison is about: zero channels on both sides of a shortcut, and a channel shuffle.
    outcomes = {row["name"]: row["torch_pruning"]["status"] for row in record["rows"]}
    assert outcomes["resnet20_a_centred"] != "exact"
    assert outcomes["shufflenet_v2_x0_5"] != "exact"


def test_channels_that_a_dead_stream_leaves_are_cut_exactly(beside: ModuleType) -> None:
    # Without Torch-Pruning: the stream's channels behind the padded shortcut, dead in every block.
    torch.manual_seed(0)
    from option_a import ResNet20

    model = ResNet20().eval().double()
    beside.randomise_(model, 0)
    dead = {"bn": {0, 3}}
    dead |= {f"blocks.{number}.bn2": {0, 3} for number in range(3)}
    beside.silent_(model, dead)
    outcome = beside._softprune(model, torch.randn(2, 3, 32, 32).double(), dead)
    assert outcome["status"] == "exact"
