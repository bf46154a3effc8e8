"""A save that is killed, or not alone, leaves a whole network under its name: the earlier one or its own."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from topologies import Chain
from torch import nn

import softprune as sp
from softprune.errors import FileFormatError
from softprune.graph import trace
from softprune.plan import make_plan
from softprune.surgery import apply_plan, read_origin, read_plans

ROOT = Path(__file__).parents[2]
RENAME = os.rename


def network(value: float) -> nn.Module:
    """A cut network that is told by its last bias."""
    model = Chain()
    plan = make_plan(trace(model, torch.zeros(2, 3, 8, 8)), model, {"bn1": torch.arange(8) < 5})
    compact = apply_plan(plan, model)
    torch.nn.init.constant_(compact.get_submodule("fc").bias, value)  # type: ignore[arg-type]
    return compact


def loaded(folder: Path) -> float:
    return sp.load(folder, Chain()).fc.bias[0].item()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Killed(BaseException):
    """Nothing of ours runs after a kill: what would clean up, fails."""


def kill_at(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the rename of that number, and nothing that would clean up runs."""
    calls = []

    def rename(*args: Any) -> None:
        calls.append(args)
        if len(calls) >= number:
            raise Killed
        RENAME(*args)

    monkeypatch.setattr("softprune.io.os.rename", rename)
    monkeypatch.setattr("softprune.io.shutil.rmtree", lambda *args, **kwargs: None)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("reader", ["load", "read_plans", "read_origin", "save"])
def test_a_save_that_is_killed_at_a_rename(
    number: int, reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = sp.save(network(1), tmp_path / "net", origin=sp.surgery.Origin("chain", "none", (3, 8, 8)))
    with monkeypatch.context() as patched:
        kill_at(number, patched)
        with pytest.raises(Killed):
            sp.save(network(2), folder)
    assert ("net" in names(tmp_path)) == (number == 1)
    assert len(names(tmp_path)) > 1
    if reader == "load":
        assert loaded(folder) == 1
    elif reader == "read_plans":
        assert len(read_plans(folder)) == 1
    elif reader == "read_origin":
        assert read_origin(folder) is not None
    sp.save(network(3), folder)
    assert loaded(folder) == 3
    assert names(tmp_path) == ["net"]


_KILLED = """
import os, signal, sys
sys.path[:0] = [{root!r}, {here!r}]
import softprune as sp
from test_files_killed import RENAME, network

calls = []

def rename(*args):
    calls.append(args)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    RENAME(*args)

os.rename = rename
sp.save(network(2), sys.argv[1])
"""


def test_a_process_that_is_killed_between_the_renames(tmp_path: Path) -> None:
    folder = sp.save(network(1), tmp_path / "net")
    code = _KILLED.format(root=str(ROOT), here=str(ROOT / "tests" / "support"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code, str(folder)], env=environment, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not folder.exists()
    assert len(names(tmp_path)) == 2
    assert loaded(folder) == 1
    sp.save(network(3), folder)
    assert loaded(folder) == 3
    assert names(tmp_path) == ["net"]


def test_a_full_disk_after_a_kill_leaves_the_earlier_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = sp.save(network(1), tmp_path / "net")
    folder.rename(_aside(tmp_path, "net") / "net")
    write = "softprune.io._write"
    with monkeypatch.context() as patched:
        patched.setattr(write, _full)
        with pytest.raises(FileFormatError, match="must have room"):
            sp.save(network(2), folder)
    assert names(tmp_path) == ["net"]
    assert loaded(folder) == 1


def test_leftovers_of_other_names_are_left_alone(tmp_path: Path) -> None:
    """Those of `net.old` and `net.b` look much like those of `net`."""
    for name in ("net.old", "net.b"):
        folder = sp.save(network(1), tmp_path / name)
        folder.rename(_aside(tmp_path, name) / name)
    mine = tmp_path / ".net.settings"
    mine.mkdir()
    sp.save(network(2), tmp_path / "net")
    sp.save(network(3), tmp_path / "net")
    assert mine.exists()
    assert [loaded(tmp_path / name) for name in ("net", "net.old", "net.b")] == [3, 1, 1]


def test_what_cannot_be_put_back_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = sp.save(network(1), tmp_path / "net")
    folder.rename(_aside(tmp_path, "net") / "net")
    monkeypatch.setattr("softprune.io.os.rename", _full)
    with pytest.raises(FileFormatError, match=r"put back.*No space.*rename the folder in '\.net\.old\.\*'"):
        loaded(folder)


@pytest.mark.parametrize("locks", [True, False])
def test_saves_and_loads_at_once(locks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each save is whole; without locks, as on some network file systems, one may be refused, and says so."""
    if not locks:
        monkeypatch.setattr("fcntl.flock", _full)
    folder = sp.save(network(0), tmp_path / "net")
    networks = [network(value) for value in range(1, 4)]
    saved, refused, wrong = [0], [], []

    def work(number: int) -> None:
        for _ in range(15):
            try:
                sp.save(networks[number], folder)
                saved.append(number + 1)
            except FileFormatError as error:
                refused.append(error)
            except Exception as error:
                wrong.append(error)

    def read() -> None:
        while any(thread.is_alive() for thread in threads):
            try:
                assert loaded(folder) in range(4)
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    if locks:
        read()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not (locks and refused)
    assert loaded(folder) in saved
    assert names(tmp_path) == ["net"] or not locks


def _full(*args: object, **kwargs: object) -> None:
    raise OSError(28, "No space left on device")


def _aside(folder: Path, name: str) -> Path:
    made = folder / f".{name}.old.abcdefgh"
    made.mkdir()
    return made
