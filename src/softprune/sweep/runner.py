"""Run a sweep: order, failures, stops and resuming, whatever executes the runs."""

import time

from softprune.sweep.executor import Executor, LocalPool
from softprune.sweep.grid import LOGS, Sweep
from softprune.sweep.halving import Halving
from softprune.sweep.jobs import Job, SweepListener
from softprune.train.control import StopSignal

_POLL_SECONDS = 0.25


class SweepRunner:
    """Runs a sweep.

    Args:
        sweep: What to run.
        executor: Where to run it; one process at a time on this machine by default.
        data_dir: The folder of the data, if another than the recipes say.
    """

    def __init__(self, sweep: Sweep, executor: Executor | None = None, *, data_dir: str | None = None) -> None:
        self.sweep, self.executor = sweep, executor or LocalPool()
        logs = sweep.folder / LOGS
        self.jobs = [Job(cell, logs / f"{cell.name}.log", data_dir) for cell in sweep.cells]
        self._by_name = {job.cell.name: job for job in self.jobs}
        self._halving = None if sweep.search is None else Halving(sweep.search)

    def run(self, listener: SweepListener, time_limit: float | None = None) -> str | None:
        """Run everything that is not done yet. Return None, or the reason to stop early."""
        for job in self.jobs:
            job.state = job.rest()
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
                    listener.on_look(self.jobs)
                    if not any(job.state in ("waiting", "running") for job in self.jobs):
                        return None
                    time.sleep(_POLL_SECONDS)
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
            if before is not None and before.state in ("failed", "blocked", "dropped"):
                job.state = "blocked"
                listener.on_change(job)
            elif (before is None or before.state == "done") and free and job.take():
                if job.finished():  # by the process that held the lock until now
                    job.release()
                    job.state = "done"
                else:
                    job.start(self.executor)
                    free -= 1
                listener.on_change(job)

    def _stop_all(self, listener: SweepListener) -> None:
        """Let the runs save, and wait for them."""
        for job in self.jobs:
            if job.task is not None:
                job.stop()
        while any(job.task is not None for job in self.jobs):
            self._poll(listener)
            time.sleep(0.05)
