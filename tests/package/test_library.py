"""The library needs torch, numpy and safetensors alone, and nothing of the laboratory."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

_PROGRAM = """
import importlib.abc, sys

class Refused(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {packages} or name.startswith("softprune.lab"):
            raise ModuleNotFoundError(f"No module named {{name!r}}")

sys.meta_path.insert(0, Refused())

import torch
import softprune as sp

model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 2)
)
example = torch.randn(2, 3, 8, 8)
print(sp.inspect(model, example))
pruner = sp.SoftPruner(model, example, target={{"macs": 0.5}}, total_steps=2)
optimizer = torch.optim.SGD(pruner.parameter_groups(weight_decay=2e-4), lr=0.1)
pruner.attach(optimizer)
for _ in range(2):
    pruner.loss(model(example).square().mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
small = pruner.compact()
assert sp.cost(small, example).macs <= 0.5 * sp.cost(model, example).macs
sp.save(small, "small.safetensors")
for name in sp.__all__:
    getattr(sp, name)
"""


@pytest.mark.slow
def test_a_network_is_pruned_and_saved_with_three_packages(tmp_path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [text.partition(">")[0] for text in project["dependencies"]] == ["torch", "numpy", "safetensors"]
    extra = {text.partition(">")[0].replace("-", "_") for text in project["optional-dependencies"]["lab"]}
    # torch itself imports these where they are installed.
    refused = extra - {"filelock", "jinja2"} | {"torchvision", "timm"}
    program = _PROGRAM.format(packages=sorted(refused))
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
