"""Sweeps: train recipes over a grid of settings, given in a TOML file, sequentially or in parallel on Ray."""

import copy
import itertools
import math
import os
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field

from softprune import models
from softprune.errors import CheckpointError, ConfigError, DataError, SoftpruneError, first_line, import_optional
from softprune.lab.config import recipes
from softprune.lab.config.settings import BASELINE, RunConfig, Section
from softprune.lab.data import DATASETS
from softprune.lab.factories import check_name
from softprune.lab.report import render_run
from softprune.lab.runs.folder import BusyError, RunFolder, check_folder_name
from softprune.lab.train.control import Listener, StopSignal
from softprune.lab.train.method import check_method
from softprune.lab.train.run import absolute_paths, check_same_config, resume, start

_AFTER = "{after}"
"""Placeholder in settings: the folder of the run named by `after`."""
_MOST_RESUMED = 3
"""How often Ray retries a run that has lost its worker or node."""
_AGAIN = 60.0
"""Seconds after which runs still in progress are interrupted again: on a busy machine Ray may lose an interrupt."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of a sweep."""

    folder: RunFolder
    config: RunConfig
    run: str
    """Name of the [[run]] that it belongs to."""
    point: dict[str, Any]
    """Its point in the grid: one value per key."""
    after: str | None = None
    """Name of an earlier cell that must finish first; None for none."""

    @property
    def name(self) -> str:
        return self.folder.path.name

    def state(self) -> str:
        return "done" if self.folder.result.is_file() else "started" if self.folder.config.is_file() else "new"


class _Run(Section):
    """A [[run]] of a sweep file."""

    recipe: str
    """Name of a built-in recipe, or a TOML file."""
    name: str = ""
    """Name of the run; by default that of the recipe."""
    set: dict[str, Any] = Field({})
    grid: dict[str, list[Any]] = Field({})
    after: str = ""
    """Name of an earlier [[run]]: each cell waits for the cell of that run at the same point in the grid."""


class _File(Section):
    """A sweep file."""

    name: str = ""
    """Name of the sweep; by default that of the file."""
    grid: dict[str, list[Any]] = Field({})
    """Grid shared by all runs."""
    run: list[_Run] = Field([])


def read_sweep(sweep: Path | str, out: Path | str | None = None, *, data_dir: str | None = None) -> list[Cell]:
    """Read and check the runs of a sweep (a TOML file or a built-in name), without writing anything."""
    path = recipes.find_file(str(sweep), recipes.SWEEPS)
    values = recipes.read_toml(path)
    try:
        file = _File(**values)
        name = check_folder_name(file.name or path.stem, "A sweep's name")
        folder = (Path("runs") / name if out is None else Path(out)).absolute()
        cells: list[Cell] = []
        for run in file.run:
            cells += _cells(run, file.grid, path.parent, folder, data_dir, cells)
        names = [cell.name for cell in cells]
        if not cells:
            raise ConfigError("A sweep must have at least one [[run]] with a recipe. Got none.")
        for cell in cells:
            if names.count(cell.name) > 1:
                raise ConfigError(f"Runs must have different names. Got {cell.name!r} twice; set `name` of one.")
            if cell.folder.config.is_file():
                check_same_config(cell.config, cell.folder.read_config(), cell.folder.config, ())
    except (CheckpointError, ConfigError, DataError) as error:
        raise ConfigError(f"{path.name}: {error}") from error
    return cells


def _cells(
    run: _Run, shared: dict[str, list[Any]], base: Path, folder: Path, data_dir: str | None, earlier: Sequence[Cell]
) -> Iterator[Cell]:
    """Yield a cell for each point in the grid of ``run``, combined with the ``shared`` grid of the file."""
    beside = base / run.recipe
    recipe = recipes.find_file(str(beside) if beside.is_file() else run.recipe, recipes.RECIPES)
    label = check_folder_name(run.name or recipe.stem, "A run's name")
    axes, content = {**shared, **run.grid}, recipes.read_toml(recipe)
    for chosen in itertools.product(*axes.values()):
        point = dict(zip(axes, chosen, strict=True))
        values, after = {**run.set, **point}, _predecessor(run.after, point, earlier) if run.after else None
        # Runs that differ only in the seed are repetitions and share a name.
        values["name"] = label + _suffix({key: value for key, value in point.items() if key != "seed"})
        if data_dir is not None:
            values["data.dir"] = data_dir
        for key, value in values.items():
            if isinstance(value, str) and _AFTER in value:
                if after is None:
                    raise ConfigError(f"{_AFTER} needs `after`, the name of an earlier [[run]]. Got none for {key}.")
                values[key] = value.replace(_AFTER, str(after.folder.path))
        config = recipes.resolve_recipe(recipe, copy.deepcopy(content), values.items())
        # Raise early what the run would raise before training, as far as possible without network and data.
        check_method(config)
        check_name("model.name", config.model.name, models.REGISTRY, options=config.model.options)
        check_name("data.name", config.data.name, DATASETS, options=config.data.options)
        weights = config.model.weights
        if after is None and weights not in ("", BASELINE) and not Path(weights).expanduser().exists():
            raise ConfigError(f"model.weights must be a file or the folder of a run. Got {weights}: no such path.")
        yield Cell(
            folder=RunFolder(folder / (label + _suffix(point))),
            config=absolute_paths(config),
            run=label,
            point=point,
            after=None if after is None else after.name,
        )


def _predecessor(label: str, point: Mapping[str, Any], earlier: Sequence[Cell]) -> Cell:
    """Return the cell of run ``label`` at the same point in the grid, for which another cell waits."""
    fitting = [
        cell
        for cell in earlier
        if cell.run == label and all(cell.point[key] == point[key] for key in cell.point.keys() & point.keys())
    ]
    if len(fitting) != 1:
        raise ConfigError(
            "`after` must name an earlier [[run]] with exactly one cell at this point in the grid. Got "
            f"{label!r}, with {len(fitting)}; earlier: {', '.join(sorted({cell.run for cell in earlier})) or 'none'}."
        )
    return fitting[0]


def _suffix(point: Mapping[str, Any]) -> str:
    """Return the suffix of a run's name: the last part of each key and its value, as in `-strength0.0001-seed2`."""
    shown = {key: f"{value:g}" if isinstance(value, float) else value for key, value in point.items()}
    parts = [f"-{key.rpartition('.')[2]}{value}" for key, value in shown.items()]
    return re.sub(r"[^A-Za-z0-9._-]+", "_", "".join(parts))


Progress = Callable[[], AbstractContextManager[Listener]]
"""Returns a context manager that yields the listener of a run."""


class Ended(NamedTuple):
    """The outcome of a run of a sweep."""

    cell: Cell
    state: Literal["done", "failed", "stopped", "blocked", "elsewhere"]
    """`blocked`: the run named by `after` has no result. `elsewhere`: another process is training it."""
    message: str = ""


def run_here(cells: list[Cell], progress: Progress, *, device: str, time_limit: float | None) -> Iterator[Ended]:
    """Train the runs one by one in this process, and yield the outcome of each. A stopped run ends the sweep."""
    cells[0].folder.path.parent.mkdir(parents=True, exist_ok=True)
    deadline = math.inf if time_limit is None else time.monotonic() + time_limit
    ended: dict[str | None, Ended] = {}
    for cell in cells:
        left = None if time_limit is None else max(0.0, deadline - time.monotonic())
        ended[cell.name] = _train(cell, ended.get(cell.after), progress, device, left)
        yield ended[cell.name]
        if ended[cell.name].state == "stopped":
            return


def run_on_ray(
    cells: list[Cell],
    progress: Progress,
    *,
    jobs: int,
    address: str | None,
    cpus: float,
    gpus: float | None,
    device: str,
    time_limit: float | None,
) -> Iterator[Ended]:
    """Train the runs as Ray tasks, ``jobs`` at a time on this machine or as many as fit on the cluster at ``address``.

    Each run requests ``cpus`` and ``gpus`` (None: one GPU, or the share of one with which all ``jobs`` fit; 0 without
    GPUs). A task that loses its worker or node is retried on another one, where it resumes the run. A signal or the
    time limit cancels the tasks: Ray interrupts each run like Ctrl-C, so that it saves.
    """
    ray = import_optional("ray", "A sweep with --jobs above 1 or --address", otherwise=", or leave them out")
    _connect(ray, jobs, address)
    try:
        cells[0].folder.path.parent.mkdir(parents=True, exist_ok=True)
        task = ray.remote(max_retries=_MOST_RESUMED, **_request(ray, 1 if address else jobs, cpus, gpus))(_train)
        references: dict[str | None, Any] = {None: None}
        for cell in cells:
            references[cell.name] = task.remote(cell, references[cell.after], progress, device, None)
        pending, cancelled = {references[cell.name]: cell for cell in cells}, -math.inf
        with StopSignal(time_limit) as stop:
            while pending:
                for reference in ray.wait(list(pending), timeout=0.5)[0]:
                    cell = pending.pop(reference)
                    try:
                        yield ray.get(reference)
                    except ray.exceptions.RayError as error:  # cancelled before it could save, or retried too often
                        yield Ended(cell, "stopped") if stop.reason() else Ended(cell, "failed", first_line(error))
                if stop.reason() and time.monotonic() - cancelled > _AGAIN:
                    cancelled = time.monotonic()
                    for reference in pending:
                        ray.cancel(reference)
    finally:
        ray.shutdown()


def _connect(ray: Any, jobs: int, address: str | None) -> None:
    """Connect to the cluster, or start Ray on this machine with one CPU slot per job."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address is None:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
        ray.init(address="local", num_cpus=jobs, include_dashboard=False, logging_level="ERROR")
        return
    try:
        ray.init(address=address, logging_level="ERROR")
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"--address must be the address of a running Ray cluster. Got {address!r}: {first_line(error)}. Start one "
            "with `ray start --head`, or omit --address to use this machine."
        ) from error


def _request(ray: Any, jobs: int, cpus: float, gpus: float | None) -> dict[str, float]:
    """Return the resources of a run. Raise a ConfigError if no node has them, since Ray would wait forever."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if gpus is None:
        most = max(node.get("GPU", 0.0) for node in nodes)
        gpus = 1 / math.ceil(jobs / most) if most else 0.0
    if not any(node.get("CPU", 0.0) >= cpus and node.get("GPU", 0.0) >= gpus for node in nodes):
        raise ConfigError(
            f"A run must fit on one node. Got {cpus:g} CPU cores and {gpus:g} GPUs per run, and no node has both; "
            "lower --cpus-per-run or --gpus-per-run."
        )
    return {"num_cpus": cpus, "num_gpus": gpus}


def _train(cell: Cell, before: Ended | None, progress: Progress, device: str, time_limit: float | None) -> Ended:
    """Start or resume a run, if ``before``, the outcome of the run that it waits for, is done."""
    folder = cell.folder
    if cell.state() == "done":
        return Ended(cell, "done")
    if before is not None and before.state != "done":
        return Ended(cell, "blocked", f"it needs {cell.after}, which has no result")
    if not folder.path.parent.is_dir():
        return Ended(cell, "failed", f"{folder.path.parent} does not exist on this node; set --out to shared storage")
    try:
        with progress() as listener:
            options: dict[str, Any] = {"device": device, "time_limit": time_limit, "listener": listener}
            if folder.config.is_file():
                outcome = resume(folder.path, data_dir=cell.config.data.dir or None, **options)
            else:
                outcome = start(cell.config, folder.path, **options)
        if outcome.stopped:
            return Ended(cell, "stopped", outcome.stopped)
        render_run(folder.path)
        return Ended(cell, "done")
    except BusyError:
        return Ended(cell, "elsewhere")
    except (SoftpruneError, OSError) as error:
        return Ended(cell, "failed", str(error))
    except Exception:  # a bug in one run must not end the others
        return Ended(cell, "failed", traceback.format_exc())
