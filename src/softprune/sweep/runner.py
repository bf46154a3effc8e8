"""Run a sweep: a process for each run, so many at a time; called again, it goes on where it stopped."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from softprune.io import unwritable
from softprune.sweep.grid import LOGS, Cell, Sweep
from softprune.train.control import EXIT_STOPPED, StopSignal

State = Literal["waiting", "running", "done", "failed", "stopped", "blocked"]
"""`blocked`: the run that it comes after has failed."""

_LOOK_EVERY = 0.25


@dataclass
class Job:
    """One run of the sweep at work."""

    cell: Cell
    log: Path
    state: State = "waiting"
    seconds: float = 0.0
    """Time at work in this call of the sweep."""
    process: subprocess.Popen[bytes] | None = None
    slot: int | None = None
    _lock: IO[str] | None = field(default=None, repr=False)
    _began: float = 0.0
    _told: bool = False

    def finished(self) -> bool:
        """Whether the run has its result."""
        return self.cell.folder.result.is_file()

    def last_row(self) -> dict[str, Any] | None:
        """The newest line of the run's metrics, of its dense baseline's as long as that is being trained."""
        for path in (self.cell.folder.metrics, self.cell.folder.dense / "metrics.jsonl"):
            try:
                lines = path.read_text(encoding="utf-8").splitlines()
                return json.loads(lines[-1])
            except (OSError, IndexError, ValueError):
                continue  # not there yet, or a line half written
        return None

    def last_words(self, lines: int = 3) -> list[str]:
        """The end of what the run printed: the reason, where it failed."""
        try:
            text = self.log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return []
        return [line for line in text.splitlines() if line.strip()][-lines:]

    def take(self) -> bool:
        """Claim the run; False while a process of an earlier sweep, or of another one, still works on it."""
        claim = self.log.with_suffix(".lock")
        try:
            claim.parent.mkdir(parents=True, exist_ok=True)
            lock = open(claim, "w", encoding="utf-8")  # noqa: SIM115  (held until the run ends)
        except OSError as error:
            raise unwritable(claim, error, "the same command goes on") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return False
        self._lock = lock
        return True

    def start(self, slot: int, extra: Sequence[str], environment: dict[str, str]) -> None:
        """Start the run's process. It inherits the claim, so that the claim outlives us if we are killed."""
        assert self._lock is not None
        command = [sys.executable, "-m", "softprune", *self.cell.arguments, *extra]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=(self._lock.fileno(),),
                start_new_session=True,  # Ctrl-C reaches us; we tell the runs
            )
        self.state, self.slot, self._began, self._told = "running", slot, time.monotonic(), False

    def look(self) -> bool:
        """Note whether the process has ended; True if it did since the last look."""
        if self.process is None:
            return False
        self.seconds = time.monotonic() - self._began
        code = self.process.poll()
        if code is None:
            return False
        self.process, self.slot = None, None
        self.release()
        # A process that is still starting up has no handler yet, and nothing to save: SIGTERM ends it.
        stopped = code == EXIT_STOPPED or (self._told and code == -signal.SIGTERM)
        self.state = "done" if self.finished() else "stopped" if stopped else "failed"
        return True

    def stop(self) -> None:
        """Tell the run to save and end."""
        assert self.process is not None
        self._told = True
        self.process.terminate()

    def release(self) -> None:
        """Give the claim back."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


class SweepListener:
    """What a sweep tells; does nothing by itself."""

    def on_look(self, jobs: Sequence[Job]) -> None:
        """Some time has passed."""

    def on_change(self, job: Job) -> None:
        """A run has started or ended."""


class SweepRunner:
    """Works a sweep off.

    Args:
        sweep: What to run.
        jobs: Runs side by side.
        devices: Given to the runs in turn, as ``softprune train --device`` takes them.
        data_dir: Where the data is, if not where the recipes say.
    """

    def __init__(
        self, sweep: Sweep, *, jobs: int = 1, devices: Sequence[str] = ("auto",), data_dir: str | None = None
    ) -> None:
        self.sweep, self.slots, self.devices, self.data_dir = sweep, jobs, devices, data_dir
        logs = sweep.folder / LOGS
        self.jobs = [Job(cell, logs / f"{cell.name}.log") for cell in sweep.cells]
        self._by_name = {job.cell.name: job for job in self.jobs}

    def run(self, listener: SweepListener, time_limit: float | None = None) -> str | None:
        """Run what is not done yet; None when nothing is left to start, or the reason to stop early."""
        for job in self.jobs:
            job.state = "done" if job.finished() else "waiting"
        with StopSignal(time_limit) as stop:
            while True:
                reason = stop.reason()
                for job in self.jobs:
                    if job.look():
                        listener.on_change(job)
                if reason is not None:
                    self._stop_all(listener)
                    return reason
                self._start_ready(listener)
                listener.on_look(self.jobs)
                if not any(job.state in ("waiting", "running") for job in self.jobs):
                    return None
                time.sleep(_LOOK_EVERY)

    def _start_ready(self, listener: SweepListener) -> None:
        busy = {job.slot for job in self.jobs if job.slot is not None}
        free = [slot for slot in range(self.slots) if slot not in busy]
        for job in self.jobs:
            if job.state != "waiting":
                continue
            before = self._by_name[job.cell.after] if job.cell.after is not None else None
            if before is not None and before.state in ("failed", "blocked"):
                job.state = "blocked"
                listener.on_change(job)
            elif (before is None or before.state == "done") and free and job.take():
                if job.finished():  # by whoever had it until now
                    job.release()
                    job.state = "done"
                else:
                    self._start(job, free.pop(0))
                listener.on_change(job)

    def _start(self, job: Job, slot: int) -> None:
        extra = ["--device", self.devices[slot % len(self.devices)]]
        if self.data_dir is not None and job.cell.arguments[0] == "resume":
            extra += ["--data-dir", self.data_dir]
        environment = dict(os.environ)
        if self.slots > 1:
            # Each process would otherwise take every core, and all of them wait for each other.
            share = max(1, (os.cpu_count() or 1) // self.slots)
            environment.setdefault("OMP_NUM_THREADS", str(share))
        job.start(slot, extra, environment)

    def _stop_all(self, listener: SweepListener) -> None:
        """Let the runs save, and wait for them."""
        running = [job for job in self.jobs if job.process is not None]
        for job in running:
            job.stop()
        for job in running:
            assert job.process is not None
            job.process.wait()
            if job.look():
                listener.on_change(job)
