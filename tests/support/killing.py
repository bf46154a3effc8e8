"""Kill a run with SIGKILL again and again, go on each time, and compare with a run that was left alone.

Processes are forked from a server that has imported everything but computed nothing, so that a start costs
milliseconds and ten kills fit into a test.
"""

import multiprocessing
import os
import random
import shutil
import signal
import time
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

from forked import train_or_resume
from tiny import assert_same, final_state, metrics

from softprune.runs.folder import RunFolder


def kill_and_resume(work: Path, kills: int, seed: int = 0, overrides: tuple[str, ...] = ()) -> dict[str, int]:
    """Run once undisturbed, and once with ``kills`` kills, every second of them while a checkpoint is written.

    Returns how many kills hit and how many of them left a half-written file; raises if the outcome differs.
    """
    server = fork_server()
    chance = random.Random(seed)
    _child(server, work, "whole", 0, overrides).join()  # the server itself starts with its first child
    _remove(work / "whole")
    began = time.monotonic()
    _child(server, work, "whole", 0, overrides).join()
    duration = time.monotonic() - began
    hit = torn = 0
    while hit < kills:
        in_write = hit % 2 == 1
        process = _child(server, work, "killed", chance.randint(1, 6) if in_write else 0, overrides)
        if in_write:
            process.join()
        else:
            process.join(chance.uniform(0.2, 0.9) * duration)
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join()
        if process.exitcode != -signal.SIGKILL:
            assert process.exitcode == 0, f"the run failed with {process.exitcode}"
            # It finished before the kill: begin again, so that every kill hits a run in progress.
            _remove(work / "killed")
            continue
        hit += 1
        torn += any((work / "killed").rglob(".*.tmp"))
    _child(server, work, "killed", 0, overrides).join()
    compare(work / "whole", work / "killed")
    return {"kills": hit, "torn": torn}


def fork_server() -> ForkServerContext:
    """A server that has imported what its children need; PYTHONPATH must lead to it."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["forked"])
    return server


def compare(whole: Path, killed: Path) -> None:
    """Weights, optimizer, masks and metrics must be the same bits."""
    assert metrics(whole) == metrics(killed)
    assert_same(final_state(whole), final_state(killed))
    results = [RunFolder(path).read_result() for path in (whole, killed)]
    for key in ("best", "last", "compact", "sites", "modules"):
        assert getattr(results[0], key) == getattr(results[1], key), key


def _child(
    server: ForkServerContext, work: Path, name: str, die_in_write: int, overrides: tuple[str, ...]
) -> ForkServerProcess:
    process = server.Process(target=train_or_resume, args=(str(work), name, die_in_write, overrides))
    process.start()
    return process


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
