"""Execute the runs of a sweep, in processes on this machine or on a Ray cluster. The runner decides which and when."""

import contextlib
import importlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from softprune.errors import ConfigError, first_line
from softprune.factories import import_optional
from softprune.lab.sweep.ray_task import Arguments, RayOptions, RayTask

_REACH_SECONDS = 10.0
"""How long a cluster may take to accept a connection."""


class LocalPool:
    """Runs ``jobs`` processes side by side on this machine, and assigns ``devices`` to them in turn."""

    def __init__(self, jobs: int = 1, devices: Sequence[str] = ("auto",)) -> None:
        self._tasks: list[subprocess.Popen[bytes] | None] = [None] * jobs
        self._devices = devices

    def free_slots(self) -> int:
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


class RayExecutor:
    """Runs the processes of a sweep as Ray tasks. ``folder`` must be visible on every node, under the same path."""

    def __init__(self, options: RayOptions, folder: Path) -> None:
        ray = import_optional("ray", "--on ray", otherwise=", or leave --on out to use this machine alone")
        self._ray, self.options, self.folder = ray, options, folder.resolve()
        self._tasks: list[RayTask] = []
        self._owns_connection = not ray.is_initialized()
        if self._owns_connection:
            self._connect()
        try:
            self._check_resources()
            self._check_paths()
        except BaseException:
            self.close()
            raise

    def free_slots(self) -> int:
        slots = self._capacity() if self.options.jobs is None else min(self._capacity(), self.options.jobs)
        return slots - sum(task.poll() is None for task in self._tasks)

    def start(self, arguments: Arguments, log: Path, lock: IO[str]) -> "RayTask":
        # Tasks end with their driver, this process: the lock need not be inherited.
        task = RayTask(self._ray, self.options, arguments, log.resolve())
        self._tasks.append(task)
        return task

    def close(self) -> None:
        if self._owns_connection and self._ray.is_initialized():
            self._ray.shutdown()

    def _connect(self) -> None:
        address = self.options.address or os.environ.get("RAY_ADDRESS")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        failures = (OSError, ValueError, OverflowError, RuntimeError, AssertionError, self._ray.exceptions.RayError)
        try:
            if address:
                _check_reachable(address)
                self._ray.init(address=address, **quiet)
                return
            with contextlib.suppress(ConnectionError):
                self._ray.init(address="auto", **quiet)
                return
            self._ray.init(include_dashboard=False, **quiet)
        except failures as error:
            raise ConfigError(
                f"--address must be that of a running Ray cluster. Got {address!r}: {first_line(error)}. Start one "
                "with `ray start --head`, or leave --address out to use this machine."
            ) from error

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _capacity(self) -> int:
        wanted, capacity = self.options.resources, 0
        for node in self._nodes():
            capacity += int(min(node["Resources"].get(name, 0.0) / wanted[name] + 1e-6 for name in wanted))
        return capacity

    def _check_resources(self) -> None:
        if not self.options.resources:
            raise ConfigError("A run on Ray must request CPU cores or GPUs. Got 0 of both.")
        if not self._capacity():
            nodes = [node["Resources"] for node in self._nodes()]
            largest = {
                name: max((node.get(name, 0.0) for node in nodes), default=0.0) for name in self.options.resources
            }
            raise ConfigError(
                f"A node must have what a run requests. Got {_amounts(self.options.resources)} per run, and nodes with "
                f"at most {_amounts(largest)}; lower --gpus-per-run, --cpus-per-run or --memory-per-run."
            )

    def _check_paths(self) -> None:
        """Raise unless every node sees the sweep's folder and the current one, which relative paths start from."""
        self.folder.mkdir(parents=True, exist_ok=True)
        probe = self.folder / f".visible-{os.getpid()}-{time.time_ns()}"
        probe.write_text("", encoding="utf-8")
        places = {
            str(probe): (self.folder, "choose a folder on shared storage with --out"),
            str(Path.cwd()): (Path.cwd(), "start the sweep from a folder on shared storage"),
        }
        strategy = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        task, nodes = self._ray.remote(num_cpus=0)(_missing), self._nodes()
        try:
            tasks = [task.options(scheduling_strategy=strategy(node["NodeID"], soft=False)) for node in nodes]
            answers = self._ray.get([each.remote(list(places)) for each in tasks], timeout=60)
        except self._ray.exceptions.RayError as error:
            raise ConfigError(
                f"Every node of the cluster must execute a short task. Got: {first_line(error)}. Wait until lost nodes "
                "have left the cluster (`ray status`), then repeat the command."
            ) from error
        finally:
            probe.unlink(missing_ok=True)
        for path, (shown, remedy) in places.items():
            without = [node for node, missing in zip(nodes, answers, strict=True) if path in missing]
            if without:
                blind = {node["NodeManagerHostname"] for node in without}
                raise ConfigError(
                    f"Every node must see the folder of the sweep and the current folder under the same path. Got "
                    f"{shown}, which is not on {', '.join(sorted(blind))}; {remedy}."
                )


def _missing(paths: list[str]) -> list[str]:
    return [path for path in paths if not Path(path).exists()]


def _amounts(resources: dict[str, float]) -> str:
    units = {"CPU": "CPUs", "GPU": "GPUs"}
    return ", ".join(
        f"{amount / 1e9:g} GB" if name == "memory" else f"{amount:g} {units[name]}"
        for name, amount in resources.items()
    )


def _check_reachable(address: str) -> None:
    """Raise an OSError unless something listens at ``address``: Ray itself would try for several minutes."""
    host, separator, port = address.rpartition("://")[2].rpartition(":")
    if separator and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_SECONDS).close()
