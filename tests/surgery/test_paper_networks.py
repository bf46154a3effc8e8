"""The paper's networks, cut by lot: the same from disk in a new process, compiled, and exported."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from comparing import random_masks
from topologies import randomise_
from torch import Tensor, nn

from softprune import models
from softprune.plan import make_plan
from softprune.selection import read_graph
from softprune.surgery import apply_plan, save

LOAD = """
import sys, torch
import softprune as sp
from softprune import models
torch.set_num_threads(1)
folder = sys.argv[1]
for name in sys.argv[2:]:
    network = sp.load(f"{folder}/{name}", models.build(name, 10)).eval()
    with torch.no_grad():
        torch.save(network(torch.load(f"{folder}/{name}-in.pt")), f"{folder}/{name}-out.pt")
"""


def _cut(name: str) -> tuple[nn.Module, Tensor]:
    channels, size, _ = models.REGISTRY[name].input_shape
    torch.manual_seed(0)
    network, example = (
        randomise_(models.build(name, 10)),
        torch.randn(2, channels, min(size, 64), min(size, 64)),
    )
    graph = read_graph(network, example)
    return apply_plan(make_plan(graph, network, random_masks(graph, 0, deaths=0.1)), network).eval(), example


@pytest.fixture(scope="module")
def cuts() -> dict[str, tuple[nn.Module, Tensor]]:
    return {name: _cut(name) for name in models.REGISTRY}


def test_from_disk_in_a_new_process(cuts: dict[str, tuple[nn.Module, Tensor]], tmp_path: Path) -> None:
    for name, (compact, example) in cuts.items():
        save(compact, tmp_path / name)
        torch.save(example, tmp_path / f"{name}-in.pt")
    subprocess.run([sys.executable, "-c", LOAD, str(tmp_path), *cuts], check=True, timeout=300)
    for name, (compact, example) in cuts.items():
        with torch.no_grad():
            expected = compact(example)
        assert torch.allclose(torch.load(tmp_path / f"{name}-out.pt"), expected, rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("name", models.REGISTRY)
def test_exported_and_compiled(cuts: dict[str, tuple[nn.Module, Tensor]], name: str) -> None:
    compact, example = cuts[name]
    exported = torch.export.export(compact, (example,), strict=False).module()
    torch.compiler.reset()
    compiled = torch.compile(compact, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        expected = compact(example)
        for other in (exported, compiled):
            assert (other(example) - expected).abs().max() <= 1e-5 * expected.abs().max()
