"""Kill processes at file operations and at random times, repeat what they did, and compare with one left alone.

Processes are forked from a server that has imported everything but computed nothing, so that a start costs
milliseconds.
"""

import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

from dying import KINDS, WAYS, Death
from forked import perform
from tiny import assert_same, final_state, metrics, tiny_recipe

from softprune.runs.folder import RunFolder

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
_KILLS_IN_A_ROW = 10
WHOLE, KILLED = "undisturbed-run", "killed-run"
"""Folders. Pages show their names, which no page has otherwise."""

SWEEP = """
[grid]
seed = [0, 1]
[[run]]
name = "scp"
recipe = "tiny.toml"
set = { "train.epochs" = 2, "records.checkpoint_steps" = 7 }
"""


@dataclass
class Tally:
    """What was killed: how often at which operation and how, and how many runs were compared."""

    points: Counter[str] = field(default_factory=Counter)
    half_written: int = 0
    compared: int = 0

    @property
    def kills(self) -> int:
        return sum(self.points.values())


def kill_and_repeat(
    action: str, work: Path, kills: int, seed: int = 0, overrides: tuple[str, ...] = ()
) -> Tally:
    """Kill an action ``kills`` times; assert that what it leaves is complete, and ends as if it was never killed.

    ``work`` is an empty folder, or one of an earlier call.
    """
    server = fork_server()
    settings = (*SETTINGS[action], *overrides)
    tiny_recipe(work)
    if not (work / "trained").exists():
        _finish(server, "train", work, "trained", SETTINGS["train"])
    started = Folders(action, work)
    whole = started.fresh(WHOLE)
    _finish(server, action, work, WHOLE, settings)  # the server itself starts with its first child
    whole = started.fresh(WHOLE)
    began = time.monotonic()
    counts = _finish(server, action, work, WHOLE, settings)
    duration = time.monotonic() - began
    tally, rng, in_a_row = Tally(), random.Random(f"{seed}/{action}"), 0
    killed = started.fresh(KILLED)
    for death in _deaths(counts, rng):
        if tally.kills == kills:
            break
        process = _start(server, action, work, KILLED, death, settings)
        if death is None:
            process.join(rng.uniform(0.1, 0.9) * duration)
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL), f"{action} failed with {process.exitcode}"
        hit = process.exitcode == -signal.SIGKILL
        if hit:
            tally.points["random time" if death is None else f"{death.way} {death.kind}"] += 1
            tally.half_written += any(killed.rglob(".*.tmp"))
            in_a_row += 1
            started.check_complete(killed, whole)
        if not hit or in_a_row == _KILLS_IN_A_ROW or action not in ("train", "finetune"):
            _finish(server, action, work, KILLED, settings)
            started.compare(whole, killed)
            tally.compared += 1
            killed, in_a_row = started.fresh(KILLED), 0
    if in_a_row:
        _finish(server, action, work, KILLED, settings)
        started.compare(whole, killed)
        tally.compared += 1
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
        self.files = {"save": "network.safetensors", "export": "network.pt2", "report": "report.html"}

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


def kill_sweep(work: Path, kills: int, seed: int = 0) -> Tally:
    """Kill a sweep at random times ``kills`` times, alone, with its runs, or one of its runs, and repeat it."""
    tiny_recipe(work)
    (work / "sweep.toml").write_text(SWEEP)
    rng, tally = random.Random(f"{seed}/sweep"), Tally()
    began = time.monotonic()
    assert _sweep(work, "whole").wait() == 0
    duration = time.monotonic() - began
    victims = itertools.cycle(("the sweep", "the sweep and its runs", "a run"))
    while tally.kills < kills:
        shutil.rmtree(work / "killed", ignore_errors=True)
        for _ in range(min(_KILLS_IN_A_ROW // 2, kills - tally.kills)):
            process, victim = _sweep(work, "killed"), next(victims)
            try:
                process.wait(rng.uniform(0.2, 0.8) * duration)
                break  # done before the kill
            except subprocess.TimeoutExpired:
                runs = _children(process.pid)
            targets = {
                "the sweep": [process.pid],
                "a run": runs,
                "the sweep and its runs": [process.pid, *runs],
            }
            for target in targets[victim]:
                os.kill(target, signal.SIGKILL)
            process.wait()
            tally.points[f"random time, {victim}"] += bool(targets[victim])
        # A run that failed by a kill makes the exit code 1; the next call resumes it.
        assert any(_sweep(work, "killed").wait() == 0 for _ in range(2))
        for path in sorted((work / "whole").glob("scp-*")):
            compare_runs(path, work / "killed" / path.name)
            tally.compared += 1
    return tally


def _sweep(work: Path, out: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "softprune", "sweep", "sweep.toml", "--out", out, "--device", "cpu"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{os.environ['PYTHONPATH']}{os.pathsep}{work}",
    }
    return subprocess.Popen(
        command, cwd=work, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def _children(process: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def fork_server() -> ForkServerContext:
    """Return a server that has imported what its children need; PYTHONPATH must lead to it."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["forked"])
    return server


def _finish(
    server: ForkServerContext, action: str, work: Path, name: str, settings: tuple[str, ...]
) -> dict[str, int]:
    """Let the action end, and return its file operations."""
    process = _start(server, action, work, name, None, settings)
    process.join()
    assert process.exitcode == 0, f"{action} failed with {process.exitcode}"
    return json.loads((work / "counts.json").read_text())


def _start(
    server: ForkServerContext,
    action: str,
    work: Path,
    name: str,
    death: Death | None,
    settings: tuple[str, ...],
) -> ForkServerProcess:
    arguments = (action, str(work), name, death, str(work / "counts.json"), settings)
    process = server.Process(target=perform, args=arguments)
    process.start()
    return process
