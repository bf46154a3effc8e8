"""Run jobs side by side on one GPU until a deadline.

    python benchmarks/gpu/run_jobs.py JOBS.json ROOT --seconds 1690 --most 6

JOBS.json is a list of objects with the fields of `Job`. Writes ROOT/queue.log, ROOT/logs/NAME.log and, at the end, the
empty file ROOT/finished. Needs only the standard library, so that it starts at once.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

STOPPED = 75
"""Exit code of a run that was stopped and has saved a checkpoint."""
SHARING = 0.7
"""Each run beside it adds this share of a run's time alone: six VGGs 0.70 on one H200, three DenseNet-40 0.72, two of
them 0.82, seven ResNet-56 0.5 to 0.7."""
GRACE = 40.0
"""Seconds between SIGTERM and SIGKILL."""
ATTEMPTS = 2
"""A crash under MPS takes the processes beside it along: each is resumed once."""


@dataclass(frozen=True)
class Job:
    """A command, and when it may start."""

    name: str
    command: list[str]
    folder: str = ""
    """The folder of its run. A run that is there already is resumed with `resume` instead of `command`."""
    resume: list[str] = field(default_factory=list)
    needs: list[str] = field(default_factory=list)
    """Paths that must exist."""
    minutes: float = 0.0
    """Time alone on the GPU. A job that would not end before the deadline is not started."""
    alone: bool = False
    """Run with nothing beside it, for measurements of time."""


class Queue:
    """Starts jobs in the order of the list, as soon as each may start."""

    def __init__(self, jobs: list[Job], root: Path, seconds: float, most: int) -> None:
        self.root, self.seconds, self.most = root, seconds, most
        self.waiting = list(jobs)
        self.running: dict[str, tuple[subprocess.Popen[bytes], Job]] = {}
        self._attempts: dict[str, int] = {}
        self._begin, self._stopped_at = time.monotonic(), 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since the queue was made."""
        return time.monotonic() - self._begin

    def run(self) -> None:
        """Run everything that can be run before the deadline."""
        (self.root / "logs").mkdir(parents=True, exist_ok=True)
        while self.running or (self.waiting and not self._stopped_at):
            self._collect()
            if self.elapsed >= self.seconds:
                self._stop()
            else:
                self._start_ready()
            time.sleep(0.5)
        self._say("not started", *(job.name for job in self.waiting))
        (self.root / "finished").touch()

    def _start_ready(self) -> None:
        for job in list(self.waiting):
            jobs = [each for _, each in self.running.values()]
            if len(jobs) >= self.most or any(each.alone for each in jobs):
                return
            if (job.alone and jobs) or not all(os.path.exists(path) for path in job.needs):
                continue
            if self.elapsed + 60 * job.minutes * (1 + SHARING * len(jobs)) > self.seconds:
                if not jobs:
                    self.waiting.remove(job)
                    self._say("not started for lack of time", job.name)
                continue
            self._start(job)

    def _start(self, job: Job) -> None:
        self.waiting.remove(job)
        self._attempts[job.name] = self._attempts.get(job.name, 0) + 1
        exists = bool(job.folder and job.resume) and (Path(job.folder) / "config.toml").is_file()
        with open(self.root / "logs" / f"{job.name}.log", "ab") as log:
            process = subprocess.Popen(
                job.resume if exists else job.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.running[job.name] = process, job
        self._say("resume" if exists else "start", job.name, f"beside {len(self.running) - 1}")

    def _collect(self) -> None:
        for name, (process, job) in list(self.running.items()):
            code = process.poll()
            if code is not None:
                del self.running[name]
                self._say("end", name, code)
                if code not in (0, STOPPED) and not self._stopped_at and self._attempts[name] < ATTEMPTS:
                    self.waiting.insert(0, job)

    def _stop(self) -> None:
        """Send SIGTERM to every job, and SIGKILL to those that are still there after the grace period."""
        if not self._stopped_at:
            self._stopped_at = self.elapsed
            self._say("stopping")
            for process, _ in self.running.values():
                process.terminate()  # the process alone: workers that load images must live until it has saved
        elif self.elapsed > self._stopped_at + GRACE:
            for process, _ in self.running.values():
                os.killpg(process.pid, signal.SIGKILL)

    def _say(self, *words: object) -> None:
        with open(self.root / "queue.log", "a", encoding="utf-8") as log:
            print(f"{self.elapsed:6.0f}", *words, file=log)


def main(arguments: list[str]) -> None:
    """Run the queue of this process; SIGTERM stops it like its deadline."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", type=Path)
    parser.add_argument("root", type=Path)
    parser.add_argument("--seconds", type=float, required=True, help="until every job is sent SIGTERM")
    parser.add_argument("--most", type=int, default=6, help="jobs at the same time")
    options = parser.parse_args(arguments)
    jobs = [Job(**job) for job in json.loads(options.jobs.read_text(encoding="utf-8"))]
    queue = Queue(jobs, options.root, options.seconds, options.most)
    signal.signal(signal.SIGTERM, lambda *_: setattr(queue, "seconds", 0.0))
    queue.run()


if __name__ == "__main__":
    main(sys.argv[1:])
