"""Run jobs side by side on one GPU until a deadline.

    python benchmarks/gpu/run_jobs.py JOBS.json ROOT --seconds 1690 --most 6

Writes ROOT/queue.log, ROOT/logs/NAME.log and, at the end, the empty file ROOT/finished. Needs only the standard
library, so that it starts at once.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

STOPPED = 75
"""Exit code of a run that was stopped and has saved a checkpoint."""
SHARING = 0.7
"""Each run beside it adds this share of a run's time alone: six VGGs 0.70 on one H200, three DenseNet-40 0.72, two of
them 0.82, seven ResNet-56 0.5 to 0.7."""
MARGIN = 1.1
"""A job starts only if it, and those that run, would end in time even if what is left takes this much longer."""
LEARN = 8
"""Epochs after which the pace of a run replaces its prediction."""
SHORTEST = 120.0
"""Seconds that a run which cannot finish must have left to be worth its start."""
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
    after: list[str] = field(default_factory=list)
    """Jobs that must have succeeded."""
    minutes: float = 0.0
    """Time alone on the GPU. A job that would not end before the deadline is not started."""
    startup: float = 0.0
    """Seconds before that, in which it does not need the GPU."""
    epochs: int = 0
    """Of the whole run, to see in its folder whether it is slower than predicted; 0 if that cannot be told."""
    resumable: bool = False
    """Whether its checkpoint is small enough to be kept: it may start even if it cannot finish."""
    brief: bool = False
    """Takes seconds and hardly any GPU time: it starts at once, however many jobs run."""
    alone: bool = False
    """Run with nothing beside it, for measurements of time."""


def advance(left: dict[str, list[float]], seconds: float) -> None:
    """Let jobs run side by side: ``left`` is each one's start-up and its time alone on the GPU, in seconds."""
    slower = 1 + SHARING * (len(left) - 1)
    for each in left.values():
        start = min(each[0], seconds)
        each[0] -= start
        each[1] = max(each[1] - (seconds - start) / slower, 0.0)


def ends(left: dict[str, list[float]]) -> dict[str, float]:
    """Return in how many seconds each of the jobs ends, if no other starts."""
    left, now, found = {name: list(each) for name, each in left.items()}, 0.0, {}
    while left:
        slower = 1 + SHARING * (len(left) - 1)
        seconds, name = min((start + work * slower, name) for name, (start, work) in left.items())
        advance(left, seconds)
        del left[name]
        found[name] = now = now + seconds
    return found


class Pace:
    """How fast a run is, by the epochs that it has done since the first one, after its start-up."""

    def __init__(self, job: Job, done: int) -> None:
        self._epochs, self._done = job.epochs, done
        self._epoch = 60 * job.minutes / max(job.epochs - done, 1)
        self._first: tuple[int, float] | None = None
        self._slower = 1.0

    def update(self, done: int, work: float) -> None:
        """Take over the number of epochs that are done, and the work that was predicted to be left by now."""
        if done > self._done and self._first is None:
            self._first = done, work
        self._done = done
        if self._known:
            first, before = self._first or (0, 0.0)
            self._slower = max(1.0, (before - work) / (done - first) / self._epoch)

    def left(self, predicted: list[float]) -> list[float]:
        """Start-up and work that are left, as predicted during the first epochs."""
        return [0.0, (self._epochs - self._done) * self._epoch * self._slower] if self._known else predicted

    @property
    def _known(self) -> bool:
        return self._first is not None and self._done >= self._first[0] + LEARN


class Queue:
    """Starts jobs in the order of the list, as soon as each may start."""

    def __init__(
        self, jobs: list[Job], root: Path, seconds: float, most: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.root, self.seconds, self.most, self._clock = root, seconds, most, clock
        self.waiting = list(jobs)
        self.running: dict[str, tuple[subprocess.Popen[bytes], Job]] = {}
        self.codes: dict[str, int] = {}
        """Exit codes of the jobs that ended."""
        self._starts: dict[str, int] = {}
        self._paces: dict[str, Pace] = {}
        self._begin, self._stopped_at = clock(), 0.0
        self.left: dict[str, list[float]] = {}
        """Predicted seconds of the jobs that run: see `advance`."""
        self._advanced = 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since the queue was made."""
        return self._clock() - self._begin

    def run(self, poll: float = 0.5) -> None:
        """Run everything that can be run before the deadline."""
        (self.root / "logs").mkdir(parents=True, exist_ok=True)
        while self.step():
            time.sleep(poll)
        (self.root / "finished").touch()

    def step(self) -> bool:
        """Collect jobs that ended, stop at the deadline, start what may start; return whether anything is left."""
        advance(self.left, self.elapsed - self._advanced)
        self._advanced = self.elapsed
        for name, (_, job) in self.running.items():
            if name in self._paces:
                self._paces[name].update(self._epochs_done(job), self.left[name][1])
        self._collect()
        if self.elapsed >= self.seconds:
            self.stop()
        for job in self._to_start():
            self._start(job)
        if self.running or (self.waiting and not self._stopped_at):
            return True
        for job in self.waiting:
            self._say("not started", job.name)
        self._say("all done")
        return False

    def stop(self) -> None:
        """Send SIGTERM to every job, and SIGKILL to those that are still there after the grace period."""
        if not self._stopped_at:
            self._stopped_at = self.elapsed
            self._say("stopping")
            for process, _ in self.running.values():
                # The process alone: workers that load images must live until it has saved.
                process.terminate()
        elif self.elapsed > self._stopped_at + GRACE:
            for process, _ in self.running.values():
                os.killpg(process.pid, signal.SIGKILL)

    def fits(self, job: Job) -> bool:
        """Whether the job, and those that run, would end in time. One that can be resumed later needs not."""
        left = self.seconds - self.elapsed
        jobs = [job, *(each for _, each in self.running.values())]
        running = {name: self._left(name) for name in self.left}
        then = ends({**running, job.name: [job.startup, 60 * job.minutes]})
        in_time = all(MARGIN * then[each.name] <= left for each in jobs if not (each.resumable or each.brief))
        return job.brief or (in_time and (not job.resumable or left >= SHORTEST or then[job.name] <= left))

    def _left(self, name: str) -> list[float]:
        pace, predicted = self._paces.get(name), self.left[name]
        return predicted if pace is None else pace.left(predicted)

    def _epochs_done(self, job: Job) -> int:
        metrics = Path(job.folder) / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.is_file() else 0

    def _collect(self) -> None:
        for name, (process, job) in list(self.running.items()):
            code = process.poll()
            if code is None:
                continue
            del self.running[name]
            self.left.pop(name, None)
            self._say("end", name, code)
            if code not in (0, STOPPED) and not self._stopped_at and self._starts[name] < ATTEMPTS:
                self.waiting.insert(0, job)
            else:
                self.codes[name] = code
        lost = [job for job in self.waiting if any(self.codes.get(name, 0) for name in job.after)]
        for job in lost:
            self.waiting.remove(job)
            self.codes[job.name] = 1
            self._say("not started", job.name, "since a job before it failed")

    def _to_start(self) -> Iterator[Job]:
        """The first job of the list that may start, until there is none."""
        while not self._stopped_at:
            jobs = [job for _, job in self.running.values()]
            if any(job.alone for job in jobs):
                return
            full = sum(not job.brief for job in jobs) >= self.most
            ready = [job for job in self.waiting if (job.brief or not full) and self._is_ready(job)]
            job = next(filter(self.fits, ready), None)
            if job is None:
                if not self.running and ready == self.waiting:
                    self.seconds = min(self.seconds, self.elapsed)  # nothing can start any more
                return
            yield job

    def _is_ready(self, job: Job) -> bool:
        there = all(self._exists(path) for path in job.needs)
        succeeded = all(self.codes.get(name) == 0 for name in job.after)
        return there and succeeded and not (job.alone and self.running)

    def _start(self, job: Job) -> None:
        self.waiting.remove(job)
        self._starts[job.name] = self._starts.get(job.name, 0) + 1
        if job.epochs:
            self._paces[job.name] = Pace(job, self._epochs_done(job))
        exists = bool(job.folder and job.resume) and (Path(job.folder) / "config.toml").is_file()
        command = job.resume if exists else job.command
        self.running[job.name] = (self._launch(job, command), job)
        if not job.brief:
            self.left[job.name] = [job.startup, 60 * job.minutes]
        self._say("resume" if exists else "start", job.name, f"beside {len(self.running) - 1}")

    def _exists(self, path: str) -> bool:
        return os.path.exists(path)

    def _launch(self, job: Job, command: list[str]) -> subprocess.Popen[bytes]:
        with open(self.root / "logs" / f"{job.name}.log", "ab") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def _say(self, *words: object) -> None:
        with open(self.root / "queue.log", "a", encoding="utf-8") as log:
            print(f"{self.elapsed:6.0f}", *words, file=log)


def read_jobs(path: Path) -> list[Job]:
    """Read the list that jobs.py wrote. An unknown name in `after` would wait for ever."""
    jobs = [Job(**job) for job in json.loads(path.read_text(encoding="utf-8"))]
    unknown = sorted({name for job in jobs for name in job.after} - {job.name for job in jobs})
    if unknown:
        raise SystemExit(f"`after` must name jobs of the list. Got {', '.join(unknown)}.")
    return jobs


def main(arguments: list[str]) -> None:
    """Run the queue of this process; SIGTERM stops it like its deadline."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", type=Path)
    parser.add_argument("root", type=Path)
    parser.add_argument("--seconds", type=float, required=True, help="until every job is sent SIGTERM")
    parser.add_argument("--most", type=int, default=6, help="jobs at the same time")
    options = parser.parse_args(arguments)
    queue = Queue(read_jobs(options.jobs), options.root, options.seconds, options.most)
    signal.signal(signal.SIGTERM, lambda *_: setattr(queue, "seconds", 0.0))
    queue.run()


if __name__ == "__main__":
    main(sys.argv[1:])
