"""What a queue of jobs would do before its deadline: the rules of run_jobs.py on a clock of its own.

Jobs take as long as predicted. A file in the folder of another run, such as the checkpoint before a cut or a dense
network, is taken to be there when half of that run's work is done.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

from run_jobs import STOPPED, Job, Queue


class _Process:
    """A job that ends when its predicted time is over."""

    def __init__(self, plan: "Plan", name: str) -> None:
        self.plan, self.name, self.code = plan, name, 0

    def poll(self) -> int | None:
        return self.code if self.code or not sum(self.plan.left.get(self.name, ())) else None

    def terminate(self) -> None:
        self.code = STOPPED


class Plan(Queue):
    """A queue that starts nothing. `lines` is its log, `unfinished` the minutes that stopped jobs have left."""

    def __init__(self, jobs: list[Job], seconds: float, most: int) -> None:
        self.now, self.lines, self.unfinished = 0.0, list[str](), dict[str, float]()
        self._folders = {f"{job.folder}/": job for job in jobs if job.folder}
        super().__init__(jobs, Path(), seconds, most, lambda: self.now)

    def run(self, poll: float = 5.0) -> None:
        """Run to the end of the clock."""
        while self.step():
            self.now += poll

    def stop(self) -> None:
        """Stop the jobs, and note what each has left to do."""
        self.unfinished |= {name: work / 60 for name, (_, work) in self.left.items()}
        super().stop()

    def _exists(self, path: str) -> bool:
        job = next((job for folder, job in self._folders.items() if path.startswith(folder)), None)
        if job is None or path.endswith("config.toml"):
            return True
        if path == f"{job.folder}/result.json" or job.name not in self.left:
            return self.codes.get(job.name) == 0
        return self.left[job.name][1] <= 30 * job.minutes

    def _epochs_done(self, job: Job) -> int:
        return 0  # no file tells; a job takes as long as predicted

    def _launch(self, job: Job, command: list[str]) -> Any:
        return _Process(self, job.name)

    def _say(self, *words: object) -> None:
        self.lines.append(" ".join([f"{self.elapsed:6.0f}", *map(str, words)]))
