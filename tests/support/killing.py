"""Kill processes at file operations and at random times, repeat what they did, and compare with one left alone.

Processes are forked from a server that has imported everything but computed nothing, so that a start costs
milliseconds.
"""

import contextlib
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

from dying import KINDS, WAYS, Death
from forked import perform
from tiny import assert_same, final_state, metrics, tiny_recipe

from softprune.lab.runs.folder import RunFolder

SETTINGS = {
    "train": ("train.compact_at=3", "method.strength=0.1"),
    "finetune": ("train.epochs=2", "finetune.epochs=2", "method.strength=0.1"),
    "save": (),
    "export": (),
    "report": (),
}
"""The actions, and the settings of their runs."""
_LARGEST_NUMBER = 8
"""Of an operation of one kind: after a few kills a run has not many left."""
_KILLS_IN_A_ROW = {"train": 10, "finetune": 10, "save": 3, "export": 5, "report": 3}
"""Kills before an action is left to end. A single file is checked after every one of them."""
WHOLE, KILLED = "undisturbed-run", "killed-run"
"""Folders. Pages show their names, which no page has otherwise."""


@dataclass
class Tally:
    """What was killed: how often at which operation and how, how many ends were compared, and what was wrong."""

    points: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    findings: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        return sum(self.points.values())

    @property
    def half_written(self) -> int:
        """Kills that left half of a file."""
        return self.points["half write"] + self.points["half fsync"]

    @contextlib.contextmanager
    def noting(self, what: str) -> Iterator[None]:
        """Note a failed assertion as a finding."""
        try:
            yield
        except AssertionError as error:
            self.findings.append(f"{what}: {error}")


def kill_and_repeat(action: str, work: Path, kills: int, seed: int = 0, overrides: tuple[str, ...] = ()) -> Tally:
    """Kill an action ``kills`` times; note where what it leaves is incomplete, or ends with other bits than alone.

    ``work`` is an empty folder, or one of an earlier call.
    """
    server = fork_server()
    settings = (*SETTINGS[action], *overrides)
    tiny_recipe(work)
    if not (work / "trained").exists():
        _finish(server, "train", work, "trained", SETTINGS["train"])
    folders = Folders(action, work)
    whole = folders.fresh(WHOLE)
    began = time.monotonic()
    counts = _finish(server, action, work, WHOLE, settings)
    duration = time.monotonic() - began
    tally, rng, in_a_row = Tally(), random.Random(f"{seed}/{action}"), 0
    killed = folders.fresh(KILLED)
    for death in _deaths(counts, rng):
        if tally.kills == kills and not in_a_row:
            break
        name = "random time" if death is None else f"{death.way} {death.kind}"
        if tally.kills < kills:
            process = _start(server, action, work, KILLED, death, settings)
            if death is None:
                process.join(rng.uniform(0.1, 0.9) * duration)
                if process.pid is not None and process.is_alive():
                    os.kill(process.pid, signal.SIGKILL)
            process.join()
            hit = process.exitcode == -signal.SIGKILL
            with tally.noting(f"{action}, {name}"):
                assert process.exitcode in (0, -signal.SIGKILL), f"it failed with {process.exitcode}"
            if hit:
                tally.points[name] += 1
                in_a_row += 1
                with tally.noting(f"{action} after a kill, {name}"):
                    folders.check_complete(killed, whole)
            if hit and in_a_row < _KILLS_IN_A_ROW[action] and tally.kills < kills:
                continue
        with tally.noting(f"{action} repeated, last kill: {name}"):
            _finish(server, action, work, KILLED, settings)
            folders.compare(whole, killed)
        tally.compared += 1
        killed, in_a_row = folders.fresh(KILLED), 0
    return tally


def _deaths(counts: dict[str, int], rng: random.Random) -> Iterator[Death | None]:
    """Yield deaths of every kind and way in turn; None for a random time."""
    points = [(kind, way) for kind in KINDS if counts.get(kind) for way in WAYS]
    rng.shuffle(points)
    for number, (kind, way) in enumerate(itertools.cycle(points)):
        if number % 5 == 4:
            yield None
        yield Death(kind, rng.randint(1, min(counts[kind], _LARGEST_NUMBER)), way)


class Folders:
    """The folders of an action: how they begin, what they may hold after a kill, and what in the end."""

    def __init__(self, action: str, work: Path) -> None:
        self.action, self.work = action, work
        self.files = {"save": "network.safetensors", "export": "network.onnx", "report": "report.html"}

    def fresh(self, name: str) -> Path:
        """Return the folder ``name`` in the state in which the action begins."""
        path = self.work / name
        shutil.rmtree(path, ignore_errors=True)
        if self.action == "report":
            shutil.copytree(self.work / "trained", path)
        elif self.action in ("save", "export"):
            path.mkdir()
        if self.action in self.files:
            (path / self.files[self.action]).write_bytes(b"an earlier file")
        return path

    def check_complete(self, killed: Path, whole: Path) -> None:
        """Assert that a kill left the earlier file or the new one."""
        if self.action in self.files:
            contents = (b"an earlier file", self._content(whole))
            assert self._content(killed) in contents, f"{self.action} left a part of a file"

    def compare(self, whole: Path, killed: Path) -> None:
        """Assert that both folders hold the same bits."""
        if self.action in self.files:
            assert self._content(killed) == self._content(whole), self.action
        else:
            compare_runs(whole, killed)

    def _content(self, folder: Path) -> bytes:
        return (folder / self.files[self.action]).read_bytes().replace(os.fsencode(folder.name), b"NAME")


def compare_runs(whole: Path, killed: Path) -> None:
    """Assert that weights, optimizer, masks, metrics and compact networks are the same bits, with no leftovers."""
    assert metrics(whole) == metrics(killed)
    assert_same(final_state(whole), final_state(killed))
    first, second = (RunFolder(path) for path in (whole, killed))
    results = [dict(folder.read_result()) for folder in (first, second)]
    for key in ("best", "last", "compact", "sites", "modules"):
        assert results[0][key] == results[1][key], key
    assert first.compact.read_bytes() == second.compact.read_bytes()
    leftovers = [str(path.relative_to(killed)) for path in killed.rglob(".*.tmp")]
    assert not leftovers, leftovers


def fork_server() -> ForkServerContext:
    """Return a server that has imported what its children need; PYTHONPATH must lead to it."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["forked"])
    return server


def _finish(server: ForkServerContext, action: str, work: Path, name: str, settings: tuple[str, ...]) -> dict[str, int]:
    """Let the action end, and return its file operations."""
    process = _start(server, action, work, name, None, settings)
    process.join()
    assert process.exitcode == 0, f"{action} failed with {process.exitcode}"
    return json.loads((work / "counts.json").read_text())


def _start(
    server: ForkServerContext, action: str, work: Path, name: str, death: Death | None, settings: tuple[str, ...]
) -> ForkServerProcess:
    arguments = (action, str(work), name, death, str(work / "counts.json"), settings)
    process = server.Process(target=perform, args=arguments)
    process.start()
    return process
