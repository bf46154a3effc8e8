"""Compact networks on disk: the same in a new process, and refused when anything about them is wrong."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from comparing import random_masks
from saved_files import rewrite
from topologies import TOPOLOGIES, randomise_
from torch import nn

import softprune as sp
from softprune.cut import Origin, apply_plan, make_plan, plans_of, read_origin
from softprune.errors import CheckpointError, FileFormatError, ModelError, PlanError, SoftpruneError
from softprune.graph import trace
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


def test_saving_twice_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    _, small = compact_of("chain")
    assert sp.save(small, tmp_path / "net") == tmp_path / "net.safetensors"
    assert sp.save(small, str(tmp_path / "net.safetensors")) == tmp_path / "net.safetensors"
    assert [path.name for path in tmp_path.iterdir()] == ["net.safetensors"]
    assert sp.save(small, tmp_path / "net.v2") == tmp_path / "net.v2.safetensors"


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    model, small = compact_of("chain")
    (tmp_path / "real").mkdir()
    link = tmp_path / "net.safetensors"
    link.symlink_to(tmp_path / "real" / "far.safetensors")
    for _ in range(2):  # the first save creates the file that the link points to
        assert sp.save(small, link) == link
        assert link.is_symlink()
    assert [path.name for path in (tmp_path / "real").iterdir()] == ["far.safetensors"]
    sp.load(link, model)


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


def test_a_process_that_is_killed_before_the_rename(tmp_path: Path) -> None:
    model, small = compact_of("chain")
    file = sp.save(small, tmp_path / "net")
    before = file.read_bytes()
    code = """
import os, signal, sys
from softprune import io
os.replace = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
io.write_atomically(io.Path(sys.argv[1]), b"other", then="")
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code, str(file)], env=environment, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert file.read_bytes() == before
    sp.load(file, model)


def test_saves_and_loads_at_once(tmp_path: Path) -> None:
    model, small = compact_of("chain")
    file = sp.save(small, tmp_path / "net")
    wrong: list[Exception] = []

    def work() -> None:
        for _ in range(10):
            try:
                sp.save(small, file)
                sp.load(file, model)
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert [path.name for path in tmp_path.iterdir()] == ["net.safetensors"]


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def _truncate_header(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:100])


def _truncate_length(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:5])


def _change_weights(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def _change_origin(file: Path) -> None:
    content = file.read_bytes()
    assert b"softprune.compact" in content
    file.write_bytes(content.replace(b"digits", b"figits"))


def _change_plan(file: Path) -> None:
    rewrite(file, lambda document: document["plans"][0]["plan"].update(macs=1))


def _other_version(file: Path) -> None:
    rewrite(file, lambda document: document.update(version=99))


def _no_plans(file: Path) -> None:
    rewrite(file, lambda document: document.update(plans=[]))


def _other_format(file: Path) -> None:
    rewrite(file, lambda document: document.update(format="other"))


def _plain_weights(file: Path) -> None:
    safetensors.torch.save_file({"weight": torch.zeros(2)}, file)


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _missing_tensor(file: Path) -> None:
    rewrite(file, tensors=lambda tensors: tensors.pop("fc.bias"))


def _dtype(dtype: torch.dtype) -> Callable[[Path], None]:
    return lambda file: rewrite(
        file, tensors=lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"].to(dtype)})
    )


def _header(text: bytes) -> Callable[[Path], None]:
    return lambda file: _write(file, len(text).to_bytes(8, "little") + text)


def _write(file: Path, content: bytes) -> None:
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncate, "does not match its checksum.*Save or copy it again; `softprune compact RUN` writes that of a run"),
        (_truncate_header, "no complete header"),
        (_truncate_length, "no complete header"),
        (_change_weights, "does not match its checksum"),
        (_change_origin, "does not match its checksum"),
        (_change_plan, "does not match its checksum"),
        (_other_version, "version 99"),
        (_no_plans, "no plans"),
        (_other_format, "not a softprune network"),
        (_plain_weights, "holds plain weights"),
        (Path.unlink, "No such file"),
        (_folder, "not a regular file"),
        (_fifo, "not a regular file"),
        (_missing_tensor, r"weights must fit the plan\. 'fc\.bias' should be \(5,\); got absent"),
        (_dtype(torch.int8), r"'fc\.weight' is torch\.float32.*Got torch\.int8"),
        (_dtype(torch.float8_e4m3fn), r"Got torch\.float8_e4m3fn"),
        (_dtype(torch.complex64), r"Got torch\.complex64"),
        (_header(b"[" * 100_000), "must be JSON"),
        (_header(b'{"a":' * 100_000), "must be JSON"),
        (_header(b"1" * 10_000), "must be JSON"),
        (_header(b"[]"), "not a softprune network"),
        (_header(b'{"__metadata__": {"softprune": 3}}'), "holds plain weights"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    model, small = compact_of("chain")
    file = sp.save(small, tmp_path / "net", origin=Origin("chain", "digits", (3, 8, 8)))
    damage(file)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(SoftpruneError, match=message):
        sp.load(file, model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("path", [None, 3, "", ".", "..", "a\0b", "\ud800"])
def test_what_is_no_path_is_refused(path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, small = compact_of("chain")
    with pytest.raises(SoftpruneError, match="Got"):
        sp.save(small, path)
    with pytest.raises(SoftpruneError, match="Got"):
        sp.load(path, model)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("shape", [[3, 200_000, 200_000], [1, 1, 10**4000]])
def test_an_origin_asks_for_no_more_memory_than_an_image_takes(shape: list[int], tmp_path: Path) -> None:
    file = sp.save(compact_of("chain")[1], tmp_path / "net", origin=Origin("chain", "digits", (3, 8, 8)))
    rewrite(file, lambda document: document["origin"].update(input_shape=shape))
    with pytest.raises(FileFormatError, match=r"at most 4,194,304 numbers. Got \["):
        read_origin(file)


def test_a_file_has_a_largest_number_of_plans(tmp_path: Path) -> None:
    model, small = compact_of("chain")
    file = sp.save(small, tmp_path / "net")
    rewrite(file, lambda document: document.update(plans=document["plans"] * 1001))
    with pytest.raises(FileFormatError, match=r"at most 1,000 plans. Got 1,001"):
        sp.load(file, model)


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


def test_what_is_no_network_is_refused(tmp_path: Path) -> None:
    dense, small = compact_of("chain")
    sp.save(small, tmp_path / "small")
    example = torch.zeros(2, 3, 8, 8)
    for call in (
        lambda: sp.load(tmp_path / "small", type(dense)),
        lambda: sp.SoftPruner(type(dense), example),
        lambda: sp.inspect(type(dense), example),
    ):
        with pytest.raises(ModelError, match=r"must be a torch\.nn\.Module\. Got the class .*build the network"):
            call()
    with pytest.raises(ModelError, match="Got PosixPath"):
        sp.load(dense, tmp_path / "small")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    _, small = compact_of("chain")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"must be writable\. Got File exists at .*file/small"):
        sp.save(small, tmp_path / "file" / "small")


def test_a_folder_or_another_file_in_place_of_a_network_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "weights.pth").touch()
    for name, said in (("run", r"is a folder; pass the file in it, 'compact"), ("weights.pth", r"is no file of")):
        with pytest.raises(FileFormatError, match=f"No such file or directory. '{tmp_path / name}' {said}"):
            sp.load(tmp_path / name, nn.Linear(1, 1))
