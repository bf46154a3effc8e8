"""The runs of a sweep while it works: their state, their lock, their output, and who listens."""

import fcntl
import json
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from softprune.errors import FileFormatError
from softprune.io import unwritable, write_atomically
from softprune.runs.result import Epoch, read_metrics
from softprune.sweep.executor import Executor, Task
from softprune.sweep.grid import Cell
from softprune.train.control import EXIT_STOPPED

State = Literal["waiting", "running", "done", "failed", "stopped", "blocked", "dropped"]
"""`blocked`: the run that it comes after has no result. `dropped`: ended early by the search."""


@dataclass
class Job:
    """One run of the sweep and its state."""

    cell: Cell
    log: Path
    data_dir: str | None = None
    state: State = "waiting"
    seconds: float = 0.0
    """Running time in this call of the sweep."""
    task: Task | None = None
    _lock: IO[str] | None = field(default=None, repr=False)
    _began: float = 0.0
    _asked_to_stop: bool = False

    def finished(self) -> bool:
        """Return whether the run has its result."""
        return self.cell.folder.result.is_file()

    @property
    def dropped_file(self) -> Path:
        """The file that says why the search dropped the run."""
        return self.log.with_suffix(".dropped")

    def rest(self) -> State:
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

    def last_words(self, lines: int = 3) -> list[str]:
        """Return the end of the run's output, which names the reason if it failed."""
        try:
            text = self.log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return []
        return [line for line in text.splitlines() if line.strip()][-lines:]

    def arguments(self) -> list[str]:
        """Return the arguments that start or resume the run."""
        arguments = self.cell.arguments
        if self.data_dir is not None and arguments[0] == "resume":
            arguments += ["--data-dir", self.data_dir]
        return arguments

    def take(self) -> bool:
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
        """Unlock the run."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def start(self, executor: Executor) -> None:
        """Start the run, which must be locked."""
        assert self._lock is not None
        self.task = executor.start(self.arguments, self.log, self._lock)
        self.state, self._began, self._asked_to_stop = "running", time.monotonic(), False

    def poll(self) -> bool:
        """Update the state; return whether the run ended since the last call."""
        if self.task is None:
            return False
        self.seconds = time.monotonic() - self._began
        code = self.task.poll()
        if code is None:
            return False
        self.task = None
        self.release()
        # A process that is still importing has no handler yet, and nothing to save: SIGTERM ends it.
        stopped = code == EXIT_STOPPED or (self._asked_to_stop and code == -signal.SIGTERM)
        self.state = self.rest()
        if self.state == "waiting":
            self.state = "stopped" if stopped else "failed"
        return True

    def stop(self) -> None:
        """Ask the run to save and exit."""
        assert self.task is not None
        self._asked_to_stop = True
        self.task.stop()

    def drop(self, reason: Mapping[str, Any]) -> None:
        """End the run early, now and in later calls of the sweep."""
        write_atomically(self.dropped_file, (json.dumps(reason) + "\n").encode(), then="repeat the command")
        self.stop()


class SweepListener:
    """Receives a sweep's events. Every method does nothing; override the ones you need."""

    def on_look(self, jobs: Sequence[Job]) -> None:
        """Called several times a second."""

    def on_change(self, job: Job) -> None:
        """A run has started or ended."""
