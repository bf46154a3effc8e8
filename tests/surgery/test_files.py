"""Compact networks on disk: the same in a new process, and refused when anything about them is wrong."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from comparing import random_masks
from topologies import TOPOLOGIES, randomise_
from torch import nn

import softprune as sp
from softprune.errors import FileFormatError, ModelError, PlanError, SoftpruneError
from softprune.graph import trace
from softprune.plan import make_plan
from softprune.surgery import apply_plan

ROOT = Path(__file__).parents[2]


def compact_of(name: str, seed: int = 3) -> tuple[nn.Module, nn.Module]:
    topology = TOPOLOGIES[name]
    torch.manual_seed(0)
    model = randomise_(topology.build())
    graph = trace(model, topology.example())
    return model, apply_plan(make_plan(graph, model, random_masks(graph, seed, deaths=0.3)), model)


def test_load_in_a_new_process_computes_the_same(tmp_path: Path) -> None:
    jobs = []
    for number, name in enumerate(TOPOLOGIES):
        _, small = compact_of(name)
        sp.save(small, tmp_path / str(number))
        example = TOPOLOGIES[name].example()
        arguments = example if isinstance(example, tuple) else (example,)
        with torch.no_grad():
            torch.save(small.eval()(*arguments), tmp_path / f"{number}.pt")
        jobs.append(name)
    code = f"""
import sys, torch
sys.path.insert(0, {str(ROOT)!r})
import softprune as sp
from torch.utils._pytree import tree_leaves
from topologies import TOPOLOGIES
for number, name in enumerate({jobs!r}):
    small = sp.load({str(tmp_path)!r} + "/" + str(number), TOPOLOGIES[name].build())
    example = TOPOLOGIES[name].example()
    arguments = example if isinstance(example, tuple) else (example,)
    with torch.no_grad():
        got = small(*arguments)
    expected = torch.load({str(tmp_path)!r} + f"/{{number}}.pt", weights_only=True)
    got, expected = (tree_leaves(x) for x in (got, expected))
    assert got and all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), name
print("same", len({jobs!r}))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    environment.pop("COVERAGE_PROCESS_START", None)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"same {len(jobs)}"


def test_saving_twice_replaces_and_leaves_nothing_behind(tmp_path: Path) -> None:
    _, small = compact_of("chain")
    sp.save(small, tmp_path / "net")
    sp.save(small, tmp_path / "net")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net"]
    assert sorted(path.name for path in (tmp_path / "net").iterdir()) == ["plan.json", "weights.safetensors"]


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_failed_save_keeps_the_earlier_network(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, small = compact_of("chain")
    sp.save(small, tmp_path / "net")
    before = (tmp_path / "net" / "plan.json").read_bytes()

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"softprune.io.os.{call}", full)
    with pytest.raises(FileFormatError, match=r"must have room\. Got .*No space left.* MiB free"):
        sp.save(small, tmp_path / "net")
    assert (tmp_path / "net" / "plan.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["net"]


def _truncate(folder: Path) -> None:
    weights = folder / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])


def _tamper_weights(folder: Path) -> None:
    content = bytearray((folder / "weights.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "weights.safetensors").write_bytes(content)


def _tamper_plan(folder: Path) -> None:
    document = json.loads((folder / "plan.json").read_text())
    document["plans"][0]["plan"]["macs"] += 1
    (folder / "plan.json").write_text(json.dumps(document))


def _cut_plan(folder: Path) -> None:
    text = (folder / "plan.json").read_text()
    (folder / "plan.json").write_text(text[: len(text) // 2])


def _other_version(folder: Path) -> None:
    document = json.loads((folder / "plan.json").read_text())
    document["version"] = 99
    (folder / "plan.json").write_text(json.dumps(document))


def _no_weights(folder: Path) -> None:
    (folder / "weights.safetensors").unlink()


def _no_plan(folder: Path) -> None:
    (folder / "plan.json").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncate, "does not match the checksum"),
        (_tamper_weights, "does not match the checksum"),
        (_tamper_plan, "does not match its checksum"),
        (_cut_plan, "not whole JSON"),
        (_other_version, "version 99"),
        (_no_weights, "no readable"),
        (_no_plan, "no readable"),
    ],
)
def test_damaged_folders_are_refused(tmp_path: Path, damage: object, message: str) -> None:
    model, small = compact_of("chain")
    sp.save(small, tmp_path / "net")
    damage(tmp_path / "net")  # type: ignore[operator]
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(SoftpruneError, match=message):
        sp.load(tmp_path / "net", model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_wrong_class_or_another_architecture_is_refused(tmp_path: Path) -> None:
    _, small = compact_of("chain")
    sp.save(small, tmp_path / "net")
    with pytest.raises(PlanError, match="this plan is for"):
        sp.load(tmp_path / "net", TOPOLOGIES["residual"].build())
    with pytest.raises(PlanError, match="without a plan"):
        sp.save(TOPOLOGIES["chain"].build(), tmp_path / "other")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    with pytest.raises(FileFormatError, match="replaces only folders that softprune wrote"):
        sp.save(small, tmp_path / "mine")
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep me"


@pytest.mark.parametrize("kind", ["new head", "more", "less"])
def test_a_network_that_was_changed_after_the_cut_is_not_saved(kind: str, tmp_path: Path) -> None:
    _, small = compact_of("chain")
    sp.save(small, tmp_path / "small")
    before = {path.name: path.read_bytes() for path in (tmp_path / "small").iterdir()}
    name, head = next((name, each) for name, each in small.named_modules() if isinstance(each, nn.Linear))
    if kind == "new head":
        small.set_submodule(name, nn.Linear(head.in_features, head.out_features + 4))
    elif kind == "more":
        small.add_module("more", nn.Linear(2, 2))
    else:
        small.set_submodule(name, nn.Identity())
    with pytest.raises(PlanError, match=r"changed after the cut: '.*' was .* and is .*Save it before"):
        sp.save(small, tmp_path / "small")
    assert {path.name: path.read_bytes() for path in (tmp_path / "small").iterdir()} == before


def test_what_is_no_network_is_refused(tmp_path: Path) -> None:
    dense, small = compact_of("chain")
    sp.save(small, tmp_path / "small")
    example = torch.zeros(2, 3, 8, 8)
    for call in (
        lambda: sp.load(tmp_path / "small", type(dense)),
        lambda: sp.SoftPruner(type(dense), example),
        lambda: sp.inspect(type(dense), example),
    ):
        with pytest.raises(
            ModelError, match=r"must be a torch\.nn\.Module\. Got the class .*build the network"
        ):
            call()
    with pytest.raises(ModelError, match="Got PosixPath"):
        sp.load(dense, tmp_path / "small")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    _, small = compact_of("chain")
    (tmp_path / "file").write_text("")
    with pytest.raises(FileFormatError, match=r"can be made\. Got .*file.*Name another"):
        sp.save(small, tmp_path / "file" / "small")
