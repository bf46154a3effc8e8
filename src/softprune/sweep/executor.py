"""Execute the runs of a sweep in processes on this machine. A sweep decides what is run and when."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

Arguments = Callable[[], list[str]]
"""Returns the arguments of `softprune` that start the run, or resume it if it was started."""


class LocalPool:
    """Runs ``jobs`` processes side by side on this machine, and assigns ``devices`` to them in turn."""

    def __init__(self, jobs: int = 1, devices: Sequence[str] = ("auto",)) -> None:
        self._tasks: list[subprocess.Popen[bytes] | None] = [None] * jobs
        self._devices = devices

    def free_slots(self) -> int:
        """Return how many more runs can be started now."""
        return len(self._free())

    def start(self, arguments: Arguments, log: Path, lock: IO[str]) -> subprocess.Popen[bytes]:
        """Start a run whose output is appended to ``log``; ``lock`` is the run's lock file, locked."""
        slot = self._free()[0]
        environment = dict(os.environ)
        if len(self._tasks) > 1:
            # Each process would otherwise use every core, and they would slow each other down.
            threads = max(1, (os.cpu_count() or 1) // len(self._tasks))
            environment.setdefault("OMP_NUM_THREADS", str(threads))
        device = self._devices[slot % len(self._devices)]
        command = [sys.executable, "-m", "softprune", *arguments(), "--device", device]
        with open(log, "ab") as output:
            task = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=(lock.fileno(),),  # so that the run stays locked if the sweep is killed
                start_new_session=True,  # Ctrl-C reaches the sweep, which stops the runs
            )
        self._tasks[slot] = task
        return task

    def close(self) -> None:
        """Release what the executor holds: nothing here."""

    def _free(self) -> list[int]:
        return [slot for slot, task in enumerate(self._tasks) if task is None or task.poll() is not None]
