"""Execute the runs of a sweep on a Ray cluster: connect to it, check it, and place the runs."""

import contextlib
import importlib
import logging
import os
import socket
import time
from pathlib import Path
from typing import IO, Any

from softprune.errors import ConfigError, first_line
from softprune.factories import import_optional
from softprune.sweep.executor import Arguments
from softprune.sweep.ray_task import RayOptions, RayTask

_REACH_SECONDS = 10.0
"""How long a cluster may take to accept a connection."""


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
        try:
            if address:
                _check_reachable(address)
                self._ray.init(address=address, **quiet)
                return
            with contextlib.suppress(ConnectionError):
                self._ray.init(address="auto", **quiet)
                return
            self._ray.init(include_dashboard=False, **quiet)
        except (
            OSError,
            ValueError,
            OverflowError,
            RuntimeError,
            AssertionError,
            self._ray.exceptions.RayError,
        ) as error:
            raise ConfigError(
                f"--address must be that of a running Ray cluster. Got {address!r}: {first_line(error)}. Start one "
                "with `ray start --head`, or leave --address out to use this machine."
            ) from error

    def _nodes(self) -> list[dict[str, float]]:
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]

    def _capacity(self) -> int:
        """Return how many runs the living nodes can hold."""
        wanted = self.options.resources
        return sum(
            int(min(node.get(name, 0.0) / amount + 1e-6 for name, amount in wanted.items())) for node in self._nodes()
        )

    def _check_resources(self) -> None:
        if not self.options.resources:
            raise ConfigError("A run on Ray must request CPU cores or GPUs. Got 0 of both.")
        if not self._capacity():
            largest = {
                name: max((node.get(name, 0.0) for node in self._nodes()), default=0.0)
                for name in self.options.resources
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
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        missing_on = self._ray.remote(num_cpus=0)(_missing)
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        try:
            answers = self._ray.get(
                [
                    missing_on.options(
                        scheduling_strategy=strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                    ).remote([str(probe), str(Path.cwd())])
                    for node in nodes
                ],
                timeout=60,
            )
        except self._ray.exceptions.RayError as error:
            raise ConfigError(
                f"Every node of the cluster must execute a short task. Got: {first_line(error)}. Wait until lost nodes "
                "have left the cluster (`ray status`), then repeat the command."
            ) from error
        finally:
            probe.unlink(missing_ok=True)
        for path, shown, remedy in (
            (str(probe), self.folder, "choose a folder on shared storage with --out"),
            (str(Path.cwd()), Path.cwd(), "start the sweep from a folder on shared storage"),
        ):
            blind = {
                node["NodeManagerHostname"] for node, missing in zip(nodes, answers, strict=True) if path in missing
            }
            if blind:
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
