"""The networks of the comparison of site kinds: every BatchNorm can be masked, and cuts are exact."""

import importlib.util
from pathlib import Path

import pytest
import torch

import softprune

FOLDER = Path(__file__).parents[2] / "benchmarks" / "site_kinds"


@pytest.mark.parametrize("name", ["resnet56", "mobilenet_v2"])
def test_all_kinds_of_sites_mask_every_batchnorm(name):
    specification = importlib.util.spec_from_file_location("networks", FOLDER / "networks.py")
    networks = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(networks)
    model, example = getattr(networks, name)(), torch.randn(2, 3, 32, 32)
    assert softprune.inspect(model, example).frozen
    assert not softprune.inspect(model, example, site_kinds=("sum", "linear", "stream")).frozen
