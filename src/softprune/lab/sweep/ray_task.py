"""A run as a Ray task: what it requests, the process on its node, and how it is resumed after a lost node."""

import contextlib
import ctypes
import fcntl
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from softprune.errors import ConfigError, first_line
from softprune.io import is_locked
from softprune.lab.train.control import EXIT_STOPPED
from softprune.log import get_logger

logger = get_logger(__name__)

Arguments = Callable[[], list[str]]
"""Returns the arguments of `softprune` that start the run, or resume it if it was started."""

_FREE_SECONDS = 300.0
"""How long a lost process may hold its lock. Shared storage releases the locks of a dead machine after a while."""
_MOST_RESUMED = 3
"""How often a run is resumed after its worker or node was lost."""
_DEVICES = ("auto", "cpu", "cuda")
_SMALLEST_AMOUNT = 0.0001
"""Ray counts resources in these units."""


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """How runs are placed on the cluster."""

    address: str | None = None
    """Address of the cluster; None for RAY_ADDRESS, a cluster on this machine, or a new one."""
    gpus_per_run: float = 0.0
    """GPUs of a run; a fraction lets runs share one."""
    cpus_per_run: float = 1.0
    """CPU cores of a run."""
    memory_per_run: float = 0.0
    """Gigabytes of memory of a run; 0 requests none."""
    jobs: int | None = None
    """Runs in parallel, at most; None for as many as the cluster holds."""
    device: str = "auto"
    """`--device` of a run: Ray has chosen its GPUs, so it names none."""

    def __post_init__(self) -> None:
        if self.device not in _DEVICES:
            raise ConfigError(
                f"--device must be {', '.join(_DEVICES[:-1])} or {_DEVICES[-1]} with --on ray, which assigns the GPUs. "
                f"Got {self.device!r}; request GPUs with --gpus-per-run."
            )
        for kind in ("gpus", "cpus", "memory"):
            amount = getattr(self, f"{kind}_per_run")
            if not (math.isfinite(amount) and (amount == 0 or amount >= _SMALLEST_AMOUNT)):
                rule = f"must be 0, or a number of at least {_SMALLEST_AMOUNT}"
                raise ConfigError(f"--{kind}-per-run {rule}. Got {amount:g}.")
        if self.gpus_per_run > 1 and self.gpus_per_run % 1:
            raise ConfigError(
                "--gpus-per-run must be a fraction of one GPU or a whole number, as Ray requires. Got "
                f"{self.gpus_per_run:g}; use {math.ceil(self.gpus_per_run)}."
            )

    @property
    def resources(self) -> dict[str, float]:
        wanted = {"CPU": self.cpus_per_run, "GPU": self.gpus_per_run, "memory": self.memory_per_run * 1e9}
        return {name: amount for name, amount in wanted.items() if amount}


class RayTask:
    """A run on the cluster. It is submitted when no process of an earlier attempt works on it any more."""

    def __init__(self, ray: Any, options: RayOptions, arguments: Arguments, log: Path) -> None:
        self._ray, self._options, self._arguments, self._log = ray, options, arguments, log
        # The run ends when the first file appears: all nodes see the sweep's folder. The second is locked by the
        # process of the run on its node, which can outlive the worker that Ray calls lost.
        self._stop_file, self._node_file = log.with_suffix(".stop"), log.with_suffix(".node")
        self._reference: Any = None
        self._code: int | None = None
        self._lost = 0
        self._stopping = False
        self._waiting_since = time.monotonic()
        self._stop_file.unlink(missing_ok=True)
        self._submit_if_free()

    def poll(self) -> int | None:
        """Return the exit code of the run, or None while it runs; resume it if its worker or node was lost."""
        if self._code is not None:
            return self._code
        if self._reference is None:
            self._submit_if_free()
        elif self._ray.wait([self._reference], timeout=0)[0]:
            self._collect()
        if self._code is not None:
            self._stop_file.unlink(missing_ok=True)
        return self._code

    def terminate(self) -> None:
        self._stopping = True
        self._stop_file.touch()

    def _submit_if_free(self) -> None:
        if self._stopping:
            self._code = EXIT_STOPPED
        elif not is_locked(self._node_file):
            self._submit()
        elif time.monotonic() - self._waiting_since > _FREE_SECONDS:
            self._note(f"softprune: a lost process still holds {self._node_file}; stop it and repeat the sweep")
            self._code = 1

    def _submit(self) -> None:
        wanted = self._options
        run = self._ray.remote(
            num_cpus=wanted.cpus_per_run,
            num_gpus=wanted.gpus_per_run,
            memory=int(wanted.memory_per_run * 1e9) or None,
            max_retries=0,  # a lost run is resumed here, with other arguments
            max_calls=1,
        )(_run)
        passed_on = ("PYTHONPATH", "PATH", "HOME", "OMP_NUM_THREADS", "LD_LIBRARY_PATH")
        environment = {name: os.environ[name] for name in passed_on if name in os.environ}
        environment.setdefault("OMP_NUM_THREADS", str(max(1, int(wanted.cpus_per_run))))
        files = map(str, (self._log, self._stop_file, self._node_file, Path.cwd()))
        self._reference = run.remote([*self._arguments(), "--device", wanted.device], *files, environment)

    def _collect(self) -> None:
        """Take the exit code of a task that ended, or prepare to resume the run if its worker or node was lost."""
        errors = self._ray.exceptions
        try:
            self._code = self._ray.get(self._reference)
        except (errors.RayTaskError, errors.RuntimeEnvSetupError) as error:
            self._note(f"softprune: the run could not be started on its node: {first_line(error)}.")
            self._code = 1
        except errors.RayError as error:
            self._lost += 1
            if self._stopping or self._lost > _MOST_RESUMED:
                self._note(
                    f"softprune: the worker or node of this run was lost {self._lost} times: {first_line(error)}."
                )
                self._code = 1
                return
            self._note("softprune: the worker or node of this run was lost; it is resumed on another one")
            logger.warning("softprune: %s lost its worker or node and is resumed", self._log.stem)
            self._reference, self._waiting_since = None, time.monotonic()

    def _note(self, line: str) -> None:
        with open(self._log, "a", encoding="utf-8") as log:
            log.write(line + "\n")


def _run(
    arguments: list[str], log: str, stop_file: str, node_file: str, folder: str, environment: dict[str, str]
) -> int:
    """Run softprune on a node until it ends; forward a request to stop. Return its exit code."""
    stop = Path(stop_file)
    if stop.exists():
        return EXIT_STOPPED  # it was stopped before it could start
    with open(log, "ab") as output, open(node_file, "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = subprocess.Popen(
            [sys.executable, "-m", "softprune", *arguments],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            pass_fds=(lock.fileno(),),
            preexec_fn=_die_with_parent,
        )
    asked = False
    while (code := process.poll()) is None:
        if not asked and stop.exists():
            process.terminate()
            asked = True
        time.sleep(0.1)
    # A process that is still importing has no handler yet, and nothing to save: SIGTERM ends it.
    return EXIT_STOPPED if asked and code < 0 else code


def _die_with_parent() -> None:
    """Have the kernel kill this process when the Ray worker dies, so that the run can be resumed elsewhere."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, on Linux
