"""Compact networks on disk: the same in a new process, and refused when anything about them is wrong."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from comparing import assert_exact, masked, random_masks, relative_difference
from saved_files import rewrite
from topologies import TOPOLOGIES, Chain, masks_of, randomise_
from torch import nn

import softprune as sp
from softprune import models
from softprune.cut import Origin, PrunePlan, apply_plan, load, make_plan, plans_of, read_origin, required_sites, save
from softprune.cut.selection import read_graph
from softprune.errors import CheckpointError, ModelError, PlanError, SoftpruneError
from softprune.graph import ChannelGraph, ConstantOutput, trace
from softprune.methods import L1Pruner

ROOT = Path(__file__).parents[2]


def compact_of(name: str, seed: int = 3) -> tuple[nn.Module, nn.Module]:
    topology = TOPOLOGIES[name]
    torch.manual_seed(0)
    model = randomise_(topology.build())
    graph = trace(model, topology.example())
    return model, apply_plan(make_plan(graph, model, random_masks(graph, seed, deaths=0.3)), model)


@pytest.mark.usefixtures("onednn")
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
sys.path.insert(0, {str(ROOT / "tests" / "support")!r})
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


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_save_keeps_the_earlier_network(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, small = compact_of("chain")
    file = sp.save(small, tmp_path / "net")
    before = file.read_bytes()

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"softprune.io.os.{call}", full)
    with pytest.raises(CheckpointError, match=r"must have room.* Got No space left.* MiB free.*save again"):
        sp.save(small, file)
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["net.safetensors"]


def _bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(change(file.read_bytes()))


def _document(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    return lambda file: rewrite(file, change)


def _plan(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Change a plan and sign it anew."""

    def apply(document: dict[str, Any]) -> None:
        plan = document["plans"][0]
        change(plan["plan"])
        body = json.dumps(plan["plan"], separators=(",", ":"), sort_keys=True)
        plan["sha256"] = hashlib.sha256(body.encode()).hexdigest()

    return _document(apply)


def _fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no end": (_bytes(lambda content: content[:-7]), "does not match its checksum.*Save or copy it again"),
    "no whole header": (_bytes(lambda content: content[:100]), "no complete header"),
    "not even its length": (_bytes(lambda content: content[:5]), "no complete header"),
    "another weight": (_bytes(lambda content: content[:-1] + bytes([content[-1] ^ 1])), "does not match its checksum"),
    "another origin": (_bytes(lambda content: content.replace(b"digits", b"figits")), "does not match its checksum"),
    "a changed plan": (
        _document(lambda document: document["plans"][0]["plan"].update(macs=1)),
        "does not match its checksum",
    ),
    "a plan without an entry": (_plan(lambda plan: plan["modules"]["conv1"].pop("inputs")), "malformed .*inputs"),
    "a plan with another entry": (_plan(lambda plan: plan["modules"]["conv1"].update(x=1)), "malformed .*'x'"),
    "a plan of another version": (_document(lambda document: document["plans"][0].update(version=1)), "version 1"),
    "a later version": (_document(lambda document: document.update(version=99)), "version 99"),
    "no plans": (_document(lambda document: document.pop("plans")), "without them"),
    "another format": (_document(lambda document: document.update(format="other")), "Got 'other'"),
    "plain weights": (lambda file: safetensors.torch.save_file({"w": torch.zeros(2)}, file), "contains plain weights"),
    "text": (lambda file: file.write_bytes((2).to_bytes(8, "little") + b"[]"), "contains plain weights"),
    "nothing": (Path.unlink, "No such file"),
    "a pipe": (_fifo, "must be a regular file"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_files_are_refused(tmp_path: Path, name: str) -> None:
    damage, message = DAMAGE[name]
    model, small = compact_of("chain")
    file = sp.save(small, tmp_path / "net", origin=Origin("chain", "digits", (3, 8, 8)))
    assert read_origin(file) == Origin("chain", "digits", (3, 8, 8))
    damage(file)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(SoftpruneError, match=message):
        sp.load(file, model)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize("origin", [None, [], "vgg16", {}, {"model": "a", "data": "b", "input_shape": "x"}])
def test_an_origin_that_makes_no_sense_is_none(tmp_path: Path, origin: object) -> None:
    file = sp.save(compact_of("chain")[1], tmp_path / "net")
    rewrite(file, lambda document: document.update(origin=origin))
    assert read_origin(file) is None


def test_a_plan_from_data_starts_folded_biases_at_zero() -> None:
    """Constants are not stored: they are in the weights that are loaded next."""
    model = randomise_(TOPOLOGIES["depthwise"].build())
    graph = trace(model, TOPOLOGIES["depthwise"].example())
    masks = masks_of(model, {"bn1": [0, 1, 2, 3], "bn2": [2, 3, 4, 5, 6, 7], "bn3": [0, 1]})
    plan = make_plan(graph, model, masks)
    assert plan.modules["pointwise"].folded
    folded: Any = apply_plan(plan, model).get_submodule("pointwise")
    empty: Any = apply_plan(PrunePlan.from_json(plan.to_json()), model).get_submodule("pointwise")
    assert folded.bias.abs().max() > 0
    assert empty.bias.shape == folded.bias.shape
    assert empty.bias.abs().max() == 0


class Noting(nn.Conv2d):
    """A convolution that stores something of its own."""

    def get_extra_state(self) -> Any:
        return {"scale": 3}

    def set_extra_state(self, state: Any) -> None:
        """Nothing to set."""


def test_extra_state_that_is_no_tensor_is_not_saved(tmp_path: Path) -> None:
    model = randomise_(nn.Sequential(Noting(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 1)))
    graph = trace(model, torch.randn(2, 3, 8, 8))
    small = apply_plan(make_plan(graph, model, {"1": torch.arange(8) < 3}), model)
    with pytest.raises(ModelError, match=r"Got a dict as '0\._extra_state' of a Noting"):
        sp.save(small, tmp_path / "net")
    assert not list(tmp_path.iterdir())


def test_a_compact_network_can_be_pickled() -> None:
    _, small = compact_of("chain")
    again = pickle.loads(pickle.dumps(small))
    assert len(plans_of(again)) == 1
    with torch.no_grad():
        example = TOPOLOGIES["chain"].example()
        assert torch.equal(again.eval()(example), small.eval()(example))


def test_a_wrong_class_or_another_architecture_is_refused(tmp_path: Path) -> None:
    _, small = compact_of("chain")
    sp.save(small, tmp_path / "net")
    with pytest.raises(PlanError, match="this plan is for"):
        sp.load(tmp_path / "net", TOPOLOGIES["residual"].build())
    with pytest.raises(PlanError, match="without a plan"):
        sp.save(TOPOLOGIES["chain"].build(), tmp_path / "other")
    (tmp_path / "mine.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="which is a folder"):
        sp.save(small, tmp_path / "mine")


@pytest.mark.parametrize("kind", ["new head", "more", "less"])
def test_a_network_that_was_changed_after_the_cut_is_not_saved(kind: str, tmp_path: Path) -> None:
    _, small = compact_of("chain")
    file = sp.save(small, tmp_path / "small")
    before = file.read_bytes()
    name, head = next((name, each) for name, each in small.named_modules() if isinstance(each, nn.Linear))
    if kind == "new head":
        small.set_submodule(name, nn.Linear(head.in_features, head.out_features + 4))
    elif kind == "more":
        small.add_module("more", nn.Linear(2, 2))
    else:
        small.set_submodule(name, nn.Identity())
    with pytest.raises(PlanError, match=r"changed after the cut: '.*' was .* and is .*Save it before"):
        sp.save(small, tmp_path / "small")
    assert file.read_bytes() == before


@pytest.mark.parametrize(("wrap", "inner"), [(nn.DataParallel, "module"), (torch.compile, "_orig_mod")])
def test_a_wrapper_is_not_saved(wrap: Callable[[nn.Module], nn.Module], inner: str, tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=rf"`compact` must be the network itself, not a wrapper.*pass compact\.{inner}\.$"
    ):
        sp.save(wrap(compact_of("chain")[1]), tmp_path / "small")


def test_a_changed_network_that_is_cut_again_loads_into_the_changed_one(tmp_path: Path) -> None:
    example = TOPOLOGIES["chain"].example()

    def changed() -> nn.Module:
        network = sp.load(tmp_path / "first", TOPOLOGIES["chain"].build())
        name, head = next((name, each) for name, each in network.named_modules() if isinstance(each, nn.Linear))
        network.set_submodule(name, nn.Linear(head.in_features, head.out_features + 4))
        return network

    sp.save(compact_of("chain")[1], tmp_path / "first")
    pruner = L1Pruner(changed(), example, ratio=0.5)
    small = pruner.compact().eval()
    sp.save(small, tmp_path / "second")
    for _ in range(2):
        again = sp.load(tmp_path / "second", changed())
        assert torch.equal(again(example), small(example))
        sp.save(again, tmp_path / "second")
    with pytest.raises(PlanError, match="this plan is for"):
        sp.load(tmp_path / "second", TOPOLOGIES["chain"].build())


def _cut(model: nn.Module, graph: ChannelGraph, seed: int = 0, deaths: float = 0.4) -> nn.Module:
    return apply_plan(make_plan(graph, model, random_masks(graph, seed, deaths=deaths)), model)


@pytest.mark.parametrize(
    "name", ["pre-activation", "dense", "inverted residual", "dead branch", "depthwise", "flatten"]
)
def test_a_cut_of_a_cut_and_back_from_disk(name: str, tmp_path: Path) -> None:
    topology = TOPOLOGIES[name]
    model, example = randomise_(topology.build()), topology.example()
    once = _cut(model, read_graph(model, example), 1)
    graph = read_graph(once, example)
    masks = random_masks(graph, 2, deaths=0.3)
    plan = make_plan(graph, once, masks)
    twice = apply_plan(plan, once)
    wide = copy.deepcopy(once).double()
    assert relative_difference(masked(wide, masks), apply_plan(plan, wide), example) <= 1e-10
    save(twice, tmp_path / "twice")
    again = load(tmp_path / "twice", topology.build())
    assert torch.equal(again(example), twice(example))
    assert len(plans_of(again)) == len(plans_of(twice)) == 2


def test_dtype_and_gradients_survive_the_disk(tmp_path: Path) -> None:
    dense = Chain()
    dense.fc.weight.requires_grad_(False)
    model = randomise_(copy.deepcopy(dense)).double()
    save(_cut(model, read_graph(model, torch.randn(2, 3, 8, 8))), tmp_path / "wide")
    again = load(tmp_path / "wide", dense)
    assert again.conv1.weight.dtype == torch.float64
    assert again.conv1.weight.requires_grad
    assert not again.fc.weight.requires_grad
    assert not again.training


@pytest.mark.parametrize(
    ("build", "options"), [(models.resnet20, {"round_to": 8}), (models.densenet40, {"gathers": False})]
)
def test_branches_that_died_in_one_cut_shrink_in_the_next(
    build: Callable[[], nn.Module], options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model = randomise_(build())
    graph = read_graph(model, torch.randn(1, 3, 32, 32))
    masks = random_masks(graph, 0)
    free = [site.name for site in graph.sites if site.name not in required_sites(graph)]
    for dead in free[3:9:3]:
        masks[dead][:] = False
    once = apply_plan(make_plan(graph, model, masks, **options), model)
    voids = [name for name, module in once.named_modules() if isinstance(module, ConstantOutput)]
    assert voids
    again = read_graph(once, torch.randn(1, 3, 32, 32))
    assert not [frozen for frozen in again.frozen if "trial" in frozen.reason]
    plan = assert_exact(again, once, random_masks(again, 1))
    assert any(plan.modules[name].changes for name in voids)
    twice = apply_plan(plan, once)
    fresh = build()
    for each in plans_of(twice):
        fresh = apply_plan(PrunePlan.from_json(each.to_json()), fresh)
    fresh.load_state_dict(twice.state_dict())
    torch.testing.assert_close(fresh.eval()(again.example.args[0]), twice.eval()(again.example.args[0]))
