"""Sweep files: recipes and a grid of settings, resolved into runs before any of them starts."""

import copy
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from softprune import models
from softprune.errors import ConfigError, DataError, check_choice, nearest
from softprune.factories import check_name
from softprune.lab.config.recipes import (
    changed_settings,
    find_recipe,
    inline_toml,
    read_toml,
    recipe_files,
    resolve_recipe,
    show_changes,
    sweep_files,
)
from softprune.lab.config.settings import BASELINE, RunConfig
from softprune.lab.data.registry import DATASETS
from softprune.lab.runs.folder import RunFolder, check_folder_name, check_not_url, own_code
from softprune.lab.runs.weights import check_weights_exist
from softprune.lab.sweep.search import Search, read_search
from softprune.lab.train.pruner import check_method
from softprune.lab.train.run import absolute_paths

_TOP = ("name", "grid", "run", "search")
_RUN = ("recipe", "name", "set", "grid", "after")
_AFTER = "{after}"
"""In a value of `set`, the folder of the run named by `after`."""
LARGEST = 5_000
"""Runs in a sweep: a few short lists multiply to more than memory holds."""
LOGS = "logs"
"""Name of the folder for the runs' logs."""

Point = dict[str, Any]
"""One value for each key of a grid."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of a sweep."""

    name: str
    """Unique in the sweep; also the name of the run's folder."""
    recipe: str
    settings: tuple[str, ...]
    """Settings as ``softprune train --set`` takes them."""
    folder: RunFolder
    config: RunConfig
    point: Point
    after: str | None = None
    """The cell that must have finished before."""
    run: str = ""
    """Name of its [[run]]."""
    data_dir: str | None = None
    """Folder of the images, in place of the recipe's."""

    def arguments(self) -> list[str]:
        """Return the arguments of `softprune` that start the run, or resume it if it was started."""
        if self.folder.config.is_file():
            images = [] if self.data_dir is None else ["--data-dir", self.data_dir]
            return ["resume", str(self.folder.path), *own_code(self.config), *images]
        chosen = [part for setting in self.settings for part in ("--set", setting)]
        return ["train", self.recipe, *chosen, "--out", str(self.folder.path)]


@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep and their folder."""

    folder: Path
    cells: tuple[Cell, ...]
    search: Search | None = None


def read_sweep(sweep: Path | str, out: Path | str | None = None, *, data_dir: str | None = None) -> Sweep:
    """Return the runs of a sweep (a TOML file, or the name of a built-in one). Check all of them; write nothing."""
    path, built_in = Path(sweep), sweep_files()
    if not path.is_file():
        if str(sweep) not in built_in:
            raise ConfigError(
                f"A sweep must be a TOML file or one of {', '.join(built_in)}. Got {str(sweep)!r}, which is neither."
                f"{nearest(str(sweep), built_in)}"
            )
        path = built_in[str(sweep)]
    values = read_toml(path)
    try:
        return _resolve(path, values, out, data_dir)
    except (ConfigError, DataError) as error:
        raise ConfigError(f"{path.name}: {error}") from error


def _resolve(path: Path, values: Mapping[str, Any], out: Path | str | None, data_dir: str | None) -> Sweep:
    for key in values:
        check_choice("A key of a sweep", key, _TOP)
    name = check_folder_name(values.get("name", path.stem), "A sweep's name")
    folder = check_not_url(out) if out is not None else Path("runs") / name
    tables = values.get("run")
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise ConfigError("A sweep must have at least one [[run]] with a recipe. Got none.")
    search = read_search(values.get("search"))
    grid = _checked_grid(values.get("grid", {}))
    cells: dict[str, Cell] = {}
    for table in tables:
        run, earlier = _read_run(table, grid, search, path.parent), tuple(cells.values())
        for cell in _cells_of(run, search, folder, data_dir, earlier):
            if cell.name in cells:
                other_run = search is None or cells[cell.name] in earlier
                remedy = "give one of them `name`" if other_run else "lower search.trials, widen a range or add choices"
                raise ConfigError(f"The runs of a sweep must have different names. Got {cell.name!r} twice; {remedy}.")
            _check_started(cell)
            cells[cell.name] = cell
    return Sweep(folder, tuple(cells.values()), search)


@dataclass(frozen=True)
class _Run:
    """A [[run]] of the file."""

    label: str
    recipe: Path
    settings: dict[str, Any]
    axes: dict[str, list[Any]]
    """Its own grid and that of the file."""
    after: Any


def _read_run(table: Mapping[str, Any], grid: Mapping[str, list[Any]], search: Search | None, base: Path) -> _Run:
    for key in table:
        check_choice("A key of [[run]]", key, _RUN)
    recipe = table.get("recipe")
    if not isinstance(recipe, str):
        raise ConfigError(f"Every [[run]] must have a recipe: its name or a TOML file. Got {recipe!r}.")
    beside = base / recipe
    found = find_recipe(str(beside) if beside.suffix == ".toml" and beside.is_file() else recipe)
    label = check_folder_name(table.get("name", found.stem), "A run's name")
    settings = table.get("set", {})
    if not isinstance(settings, Mapping):
        raise ConfigError(f"`set` must be a table of settings with a value each. Got {settings!r}.")
    axes = {**grid, **_checked_grid(table.get("grid", {}))}
    for key in () if search is None else search.space:
        if key in axes or key in settings:
            raise ConfigError(
                f"A setting must have its values in one place. Got {key} in [search.space] and in `grid` or `set`; "
                "remove one."
            )
    return _Run(label, found, dict(settings), axes, table.get("after"))


def _cells_of(
    run: _Run, search: Search | None, folder: Path, data_dir: str | None, earlier: Sequence[Cell]
) -> Iterator[Cell]:
    """Yield a cell for each point of the grid and each trial of the search."""
    trials: list[Point] = [{}] if search is None else search.points()
    count = len(earlier) + math.prod(map(len, run.axes.values())) * len(trials)
    if count > LARGEST:
        raise ConfigError(f"A sweep can have at most {LARGEST:,} runs. Got {count:,}; split it into several files.")
    content = read_toml(run.recipe)
    find_after = _finder(run.after, (*run.axes, *trials[0]), earlier)
    for *chosen, trial in itertools.product(*run.axes.values(), trials):
        point = {**dict(zip(run.axes, chosen, strict=True)), **trial}
        after = find_after(point)
        values = {**run.settings, **point}
        # Runs that differ only in their seed are repetitions and share a name.
        values["name"] = run.label + _suffix({key: value for key, value in point.items() if key != "seed"})
        if data_dir is not None:
            values["data.dir"] = str(Path(data_dir).expanduser().resolve())
        values = {key: _filled_in(key, value, after) for key, value in values.items()}
        config = resolve_recipe(run.recipe, copy.deepcopy(content), values.items())
        _check_config(config, search, after)
        name = run.label + _suffix(point)
        if name == LOGS:
            raise ConfigError(f"{LOGS!r} is the folder of the runs' logs. Got a run of that name; choose another.")
        yield Cell(
            name=name,
            recipe=run.recipe.stem if run.recipe in recipe_files().values() else str(run.recipe),
            settings=tuple(f"{key}={inline_toml(value)}" for key, value in values.items()),
            folder=RunFolder(folder / name),
            config=config,
            point=point,
            after=None if after is None else after.name,
            run=run.label,
            data_dir=data_dir,
        )


def _check_config(config: RunConfig, search: Search | None, after: Cell | None) -> None:
    """Raise what the run itself would raise before training, apart from what the data shows."""
    check_method(config.method, compact_at=config.train.compact_at)
    check_name("model.name", config.model.name, models.REGISTRY, options=config.model.options)
    check_name("data.name", config.data.name, DATASETS, options=config.data.options)
    if after is None and config.model.weights not in ("", BASELINE):
        check_weights_exist(Path(config.model.weights).expanduser())
    epochs = config.train.epochs
    if search and search.factor and "first_epoch" in search.model_fields_set and search.first_epoch >= epochs:
        raise ConfigError(
            f"search.first_epoch must be below train.epochs. Got {search.first_epoch} and {epochs}; lower it, or set "
            "search.factor = 0 to let all trials finish."
        )


def _check_started(cell: Cell) -> None:
    if not cell.folder.config.is_file():
        return
    changed = changed_settings(absolute_paths(cell.config), absolute_paths(cell.folder.read_config()))
    sweep = cell.folder.path.absolute().parent
    for key, (now, before) in tuple(changed.items()):
        # The images, and a run of this sweep before it was moved, may be elsewhere.
        paths = isinstance(now, str) and isinstance(before, str)
        if key == "data.dir" or (paths and Path(now).parent == sweep and Path(now).name == Path(before).name):
            del changed[key]
    if changed:
        raise ConfigError(
            f"{cell.folder.path} must hold the run {cell.name!r} with the settings that it has now. Got a changed "
            f"sweep or recipe, {show_changes(changed)}; give the run another name, the sweep another folder (--out), "
            "or remove the old run."
        )


def _checked_grid(grid: Any) -> dict[str, list[Any]]:
    if not isinstance(grid, Mapping):
        raise ConfigError(f"`grid` must be a table of settings with a list of values each. Got {grid!r}.")
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"`grid` must give every setting a list of values. Got {key} = {values!r}.")
    return dict(grid)


def _suffix(point: Point) -> str:
    """Return the last part of each key with its value, such as `-strength0.0001-seed2`."""
    text = ""
    for key, value in point.items():
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        text += f"-{key.rpartition('.')[2]}" + re.sub(r"[^A-Za-z0-9._-]+", "_", shown)
    return text


def _finder(label: Any, keys: Iterable[str], earlier: Sequence[Cell]) -> Callable[[Point], Cell | None]:
    """Return what finds the cell that a run waits for: the one of run `label` with the same values in the grid.

    It looks values up, since a sweep may have thousands of cells.
    """
    cells = [cell for cell in earlier if cell.run == str(label)]
    shared = [key for key in keys if cells and key in cells[0].point]
    by_values: dict[tuple[Any, ...], list[Cell]] = {}

    def values(point: Point) -> tuple[Any, ...]:
        return tuple(v if isinstance(v, int | float | str) else repr(v) for v in map(point.get, shared))

    for cell in cells:
        by_values.setdefault(values(cell.point), []).append(cell)

    def find(point: Point) -> Cell | None:
        same = by_values.get(values(point), [])
        if label is not None and len(same) != 1:
            known = sorted(cell.name for cell in earlier)
            raise ConfigError(
                "`after` must name one earlier [[run]], which has no setting in its grid that this one lacks. Got "
                f"{label!r}, which fits {len(same)} of: {', '.join(known[:10]) or 'no run'}"
                f"{' and others' * (len(known) > 10)}."
            )
        return None if label is None else same[0]

    return find


def _filled_in(key: str, value: Any, after: Cell | None) -> Any:
    """Return a setting with the folder of the run that `after` names."""
    if not isinstance(value, str) or _AFTER not in value:
        return value
    if after is None:
        raise ConfigError(f"{_AFTER} is the folder of the run that `after` names. Got none for {key}.")
    return value.replace(_AFTER, str(after.folder.path.absolute()))
