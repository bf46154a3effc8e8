"""The comparison with Torch-Pruning, without Torch-Pruning."""

import importlib
from importlib.util import find_spec

import pytest
import torch

pytestmark = pytest.mark.skipif(
    None in (find_spec("torchvision"), find_spec("timm")), reason='the extras "vision" and "timm" are not installed'
)


def test_channels_that_a_dead_stream_leaves_are_cut_exactly() -> None:
    # The channels of the stream after the padded shortcut, dead in every block.
    beside = importlib.import_module("beside_torch_pruning")
    torch.manual_seed(0)
    model = importlib.import_module("zoo_networks").ResNet20().eval().double()
    beside.randomise_(model, 0)
    dead = {"bn": {0, 3}}
    dead |= {f"blocks.{number}.bn2": {0, 3} for number in range(3)}
    beside.silent_(model, dead)
    outcome = beside._softprune(model, torch.randn(2, 3, 32, 32).double(), dead)
    assert outcome["status"] == "exact"
