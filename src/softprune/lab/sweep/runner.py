"""Run a sweep: order, failures, stops, early ends of trials and resuming, whatever executes the runs."""

import fcntl
import json
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from softprune.errors import FileFormatError
from softprune.io import unwritable, write_atomically
from softprune.lab.runs.reading import read_metrics
from softprune.lab.runs.result import Epoch
from softprune.lab.sweep.executor import LocalPool, RayExecutor
from softprune.lab.sweep.grid import LOGS, Cell, Sweep
from softprune.lab.sweep.ray_task import RayTask
from softprune.lab.sweep.search import Search
from softprune.lab.train.control import EXIT_STOPPED, StopSignal

Executor = LocalPool | RayExecutor
State = Literal["waiting", "running", "done", "failed", "stopped", "blocked", "dropped"]
"""`blocked`: the run that it comes after has no result. `dropped`: ended early by the search."""


@dataclass
class Job:
    """One run of the sweep and its state."""

    cell: Cell
    log: Path
    state: State = "waiting"
    seconds: float = 0.0
    """Running time in this call of the sweep."""
    task: subprocess.Popen[bytes] | RayTask | None = None
    _lock: IO[str] | None = field(default=None, repr=False)
    _began: float = 0.0
    _asked_to_stop: bool = False
    _code: int | None = None
    """Exit code of the run's last process here."""

    def finished(self) -> bool:
        return self.cell.folder.result.is_file()

    @property
    def dropped_file(self) -> Path:
        """The file that says why the search dropped the run."""
        return self.log.with_suffix(".dropped")

    def idle_state(self) -> State:
        """Return the state of the run while nothing works on it."""
        return "done" if self.finished() else "dropped" if self.dropped_file.is_file() else "waiting"

    def last_row(self) -> Epoch | None:
        """Return the newest line of the run's metrics, or of its dense baseline's while that is trained."""
        for path in (self.cell.folder.metrics, self.cell.folder.dense / "metrics.jsonl"):
            try:
                return read_metrics(path)[0][-1]
            except (OSError, IndexError, FileFormatError):
                continue  # missing, empty or damaged
        return None

    def last_lines(self, lines: int = 3) -> list[str]:
        """Return why the run was dropped, or the end of its output, which names the reason if it failed."""
        if self.state == "dropped":
            try:
                why = json.loads(self.dropped_file.read_text(encoding="utf-8"))
                return [f"not among the best of {why['trials']} trials after epoch {why['epoch']}"]
            except (OSError, ValueError, KeyError, TypeError):
                return []  # written by hand, or damaged
        number = -(self._code or 0)
        killed = [f"ended by signal {number}, {signal.strsignal(number)}"] if number > 0 else []
        try:
            text = self.log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return killed
        return [line for line in text.splitlines() if line.strip()][-lines:] + killed

    def lock(self) -> bool:
        """Lock the run. Return False while a process of an earlier sweep, or of another one, works on it."""
        path = self.log.with_suffix(".lock")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = open(path, "w", encoding="utf-8")  # noqa: SIM115  (held until the run ends)
        except OSError as error:
            raise unwritable(path, error, "repeat the command") from error
        try:
            # Not the package filelock: the run's process must inherit this lock.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return False
        self._lock = lock
        return True

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def start(self, executor: Executor) -> None:
        assert self._lock is not None
        self.task = executor.start(self.cell.arguments, self.log, self._lock)
        self.state, self._began, self._asked_to_stop = "running", time.monotonic(), False

    def poll(self) -> bool:
        """Update the state; return whether the run ended since the last call."""
        if self.task is None:
            return False
        self.seconds = time.monotonic() - self._began
        code = self._code = self.task.poll()
        if code is None:
            return False
        self.task = None
        self.release()
        # A process that is still importing has no handler yet, and nothing to save: SIGTERM ends it.
        stopped = code == EXIT_STOPPED or (self._asked_to_stop and code == -signal.SIGTERM)
        self.state = self.idle_state()
        if self.state == "waiting":
            self.state = "stopped" if stopped else "failed"
        return True

    def stop(self) -> None:
        """Ask the run to save and exit."""
        assert self.task is not None
        self._asked_to_stop = True
        self.task.terminate()

    def drop(self, reason: Mapping[str, Any]) -> None:
        """End the run early, now and in later calls of the sweep."""
        write_atomically(self.dropped_file, (json.dumps(reason) + "\n").encode(), then="repeat the command")
        self.stop()


class SweepListener:
    """Receives a sweep's events. Every method does nothing; override the ones you need."""

    def on_poll(self, jobs: Sequence[Job]) -> None:
        """Called several times a second."""

    def on_change(self, job: Job) -> None:
        """A run has started or ended."""


_POLL_SECONDS = 0.25


@dataclass
class Halving:
    """Ends trials early: asynchronous successive halving (ASHA, Li et al. 2020) on the metrics that runs write.

    Pareto dominance takes the place of one score, so that a trial that prunes more is not dropped for its accuracy.
    """

    search: Search
    _seen: dict[tuple[str, int], dict[str, tuple[float, int]]] = field(default_factory=dict)
    """For every run of the file and every rung: top-1 and MACs of the trials that reached it."""
    _judged: set[tuple[str, int]] = field(default_factory=set)
    """Trials that have run here, with the rungs that they reached."""
    _looks: dict[str, tuple[int, State]] = field(default_factory=dict)
    """Size of the metrics and state of each trial when it was last looked at."""

    def drop_losers(self, jobs: Iterable[Job]) -> None:
        """Read the metrics of all trials, and drop those that run and are not among the best at their newest rung.

        A trial that waits here may be in training in another sweep of the same folder.
        """
        for job in jobs:
            try:
                look = job.cell.folder.metrics.stat().st_size, job.state
                if self._looks.get(job.cell.name) == look:
                    continue  # no epoch has ended since the last look
                self._looks[job.cell.name] = look
                rows = {row.number: row for row in read_metrics(job.cell.folder.metrics)[0]}
            except (OSError, FileFormatError):
                continue  # nothing yet, or damaged: the run itself reports it
            for rung in self.search.rungs(job.cell.config.train.epochs):
                seen = self._seen.setdefault((job.cell.run, rung), {})
                row = rows.get(rung)
                if row is None or row.test_top1 is None:
                    continue
                seen[job.cell.name] = (row.test_top1, row.macs)
                if job.state != "running" or (job.cell.name, rung) in self._judged:
                    continue
                self._judged.add((job.cell.name, rung))
                if not self._continues(job.cell.name, seen):
                    job.drop({"epoch": rung, "top1": row.test_top1, "macs": row.macs, "trials": len(seen)})
                    break

    def _continues(self, name: str, seen: Mapping[str, tuple[float, int]]) -> bool:
        """Return whether a trial is not dominated, or among the best 1 / factor by the number that dominate it."""

        def dominators(one: str) -> int:
            top1, macs = seen[one]
            return sum(
                other_top1 >= top1 and other_macs <= macs and (other_top1, other_macs) != (top1, macs)
                for other_top1, other_macs in seen.values()
            )

        own = dominators(name)
        better = sum(dominators(other) < own for other in seen)
        return own == 0 or better < len(seen) / self.search.factor


class SweepRunner:
    """Runs a sweep, one process at a time on this machine by default."""

    def __init__(self, sweep: Sweep, executor: Executor | None = None) -> None:
        self.sweep, self.executor = sweep, executor or LocalPool()
        logs = sweep.folder / LOGS
        self.jobs = [Job(cell, logs / f"{cell.name}.log") for cell in sweep.cells]
        self._by_name = {job.cell.name: job for job in self.jobs}
        self._halving = None if sweep.search is None else Halving(sweep.search)

    def run(self, listener: SweepListener, time_limit: float | None = None) -> str | None:
        """Run everything that is not done yet. Return None, or the reason to stop early."""
        for job in self.jobs:
            job.state = job.idle_state()
        try:
            with StopSignal(time_limit) as stop:
                while True:
                    reason = stop.reason()
                    self._poll(listener)
                    if reason is not None:
                        self._stop_all(listener)
                        return reason
                    if self._halving is not None:
                        self._halving.drop_losers(self.jobs)
                    self._start_ready(listener)
                    listener.on_poll(self.jobs)
                    if not any(job.state in ("waiting", "running") for job in self.jobs):
                        return None
                    time.sleep(_POLL_SECONDS)
        except Exception:
            self._stop_all(SweepListener())  # they would continue without a sweep that stops them
            raise
        finally:
            self.executor.close()

    def _poll(self, listener: SweepListener) -> None:
        for job in self.jobs:
            if job.poll():
                listener.on_change(job)

    def _start_ready(self, listener: SweepListener) -> None:
        free = self.executor.free_slots()
        for job in self.jobs:
            if job.state != "waiting":
                continue
            before = self._by_name[job.cell.after] if job.cell.after is not None else None
            if before is not None and before.state in ("failed", "stopped", "blocked", "dropped"):
                job.state = "blocked"
                listener.on_change(job)
            elif (before is None or before.state == "done") and free and job.lock():
                job.state = job.idle_state()  # the process that held the lock may have finished or dropped it
                if job.state == "waiting":
                    job.start(self.executor)
                    free -= 1
                else:
                    job.release()
                listener.on_change(job)

    def _stop_all(self, listener: SweepListener) -> None:
        """Let the runs save, and wait for them."""
        for job in self.jobs:
            if job.task is not None:
                job.stop()
        while any(job.task is not None for job in self.jobs):
            self._poll(listener)
            listener.on_poll(self.jobs)
            time.sleep(0.05)
