"""The folder of a run: its files, how each is written and read, and a run as reports and comparisons read it."""

import contextlib
import os
import platform
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from softprune.errors import CheckpointError, ConfigError, FileFormatError, SoftpruneError
from softprune.io import create_file, read_bytes, unwritable, write_atomically
from softprune.lab.config.recipes import dump_config, read_config
from softprune.lab.config.settings import RunConfig
from softprune.lab.factories import is_factory_name
from softprune.lab.runs.result import (
    Environment,
    Epoch,
    Moment,
    Record,
    Result,
    Variant,
    best_epoch,
    parse,
    to_line,
    totals_of,
)

_THEN = "resume the run"


class BusyError(CheckpointError):
    """Another process writes the run."""


class RunFolder:
    """The paths of a run, and how each file in it is written and read."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config = self.path / "config.toml"
        self.metrics = self.path / "metrics.jsonl"
        self.result = self.path / "result.json"
        self.checkpoints = self.path / "checkpoints"
        self.compact = self.path / "compact.safetensors"
        self.bench = self.path / "bench.json"
        self.report = self.path / "report.html"
        self.dense = self.path / "dense"
        self.log = self.path / "run.log"
        self.lock_file = self.path / ".lock"

    @property
    def whole(self) -> "RunFolder":
        """The run that is started and resumed: for a baseline, the run that contains it."""
        around = RunFolder(self.path.parent)
        return around if self.path == around.dense and around.config.is_file() else self

    @property
    def resume_command(self) -> str:
        command = ["softprune", "resume", str(self.whole.path)]
        with contextlib.suppress(SoftpruneError, OSError):  # a damaged config.toml must not hide the first error
            config = self.whole.read_config()
            # A command imports code that a run names only if the command names it too.
            for key in ("model", "data", "method"):
                name = config.setting(f"{key}.name")
                command += [f"--{key}", name] if is_factory_name(name) else []
        return shlex.join(command)

    @classmethod
    def create(cls, path: Path | str, config: RunConfig) -> "RunFolder":
        """Make the folder of a new run and write its configuration."""
        folder = cls(path)
        folder.check_new()
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            create_file(folder.config, dump_config(config).encode())
        except OSError as error:
            raise ConfigError(
                f"A new run must have a folder that can be made and written to. Got {path}: {error.strerror or error}. "
                "Name another folder with --out."
            ) from error
        return folder

    def check_new(self) -> None:
        """Raise a ConfigError if the folder holds a run already."""
        if os.path.lexists(self.config):
            raise ConfigError(
                f"A new run must have its own folder. Got {self.path}, which holds a run already. Resume it "
                f"(`{self.resume_command}`), or name another folder with --out."
            )

    @classmethod
    def open(cls, path: Path | str) -> "RunFolder":
        folder = cls(path)
        if not folder.config.is_file():
            raise ConfigError(
                f"A run must be a folder that `softprune train` made, with a config.toml in it. Got {path}."
            )
        return folder

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only process that writes the run, and remove the temporary files of a killed one.

        The kernel releases the lock when the process ends, however it ends. Reading needs no lock.
        """
        lock = FileLock(self.lock_file)
        try:
            lock.acquire(blocking=False)
            self.lock_file.write_text(f"process {os.getpid()} on {platform.node()}\n", encoding="utf-8")
        except Timeout:
            holder = read_bytes(self.lock_file).decode(errors="replace").strip() or "another process"
            raise BusyError(
                f"Only one process may write a run at a time. Got {self.path}, which {holder} is training. Wait until "
                f"it ends, or stop it with SIGTERM (it saves first); then `{self.resume_command}`."
            ) from None
        except OSError as error:
            raise unwritable(self.lock_file, error, _THEN) from error
        try:
            for folder in (self.path, self.checkpoints):
                for leftover in folder.glob(".*.tmp"):
                    leftover.unlink(missing_ok=True)
            yield
        finally:
            lock.release()

    def read_config(self) -> RunConfig:
        return read_config(self.config)

    def write_history(self, rows: Sequence[Epoch]) -> None:
        """Make metrics.jsonl hold exactly ``rows``: the epochs of the checkpoint that a run resumes from."""
        write_atomically(self.metrics, "".join(map(to_line, rows)).encode(), then=_THEN)

    def append_metrics(self, row: Epoch) -> None:
        """Add the line of one epoch. On resume :meth:`write_history` removes a line that a crash cut off."""
        try:
            with open(self.metrics, "a", encoding="utf-8") as file:
                file.write(to_line(row))
        except OSError as error:
            raise unwritable(self.metrics, error, _THEN) from error

    def write_result(self, result: Result) -> None:
        write_atomically(self.result, result.to_json().encode(), then=_THEN)

    def read_result(self) -> Result:
        """Return the content of result.json, or raise an error that says why there is none."""
        if not self.result.exists():
            raise ConfigError(
                f"A finished run must have a result.json. Got none at {self.result}. If the run was stopped, "
                f"`{self.resume_command}` finishes it."
            )
        remedy = (
            "If a newer softprune wrote it, read it with that one. Otherwise delete it, and "
            f"`{self.resume_command}` writes it again from the last checkpoint."
        )
        return parse(Result, read_bytes(self.result), str(self.result), remedy)


def check_folder_name(name: Any, key: str = "name") -> str:
    """Return ``name`` if it can be the name of a folder, or raise a ConfigError that names ``key``."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ConfigError(f"{key} must be usable as the name of a folder. Got {name!r}; use --out for the path.")
    return name


# --- a run as reports and comparisons read it: finished, or still in training ----------------------------------------


class BenchPair(Record, extra="ignore"):
    """A row of bench.json: both networks under one backend, precision and batch size."""

    batch: int
    round_to: int = 0
    """Widths were cut to multiples of it; 0: as the run was cut."""
    dense: dict[str, Any] | None
    compact: dict[str, Any] | None


class BenchFile(Record, extra="ignore"):
    """What reports read of bench.json, which `softprune bench RUN --out RUN/bench.json` writes."""

    rows: tuple[BenchPair, ...]


class Run(Result):
    """The record of a finished run, or as much of it as a run in training has."""

    path: Path
    table: tuple[Variant, ...] = ()
    images_per_second: float | None = None  # type: ignore[assignment]
    best: Moment | None = None  # type: ignore[assignment]
    last: Moment | None = None  # type: ignore[assignment]
    environment: Environment | None = None  # type: ignore[assignment]
    in_progress: bool = False
    notes: tuple[str, ...] = ()
    baseline_top1: float | None = None
    """Accuracy of dense runs compared with this one, for a run that trained no dense network itself."""

    @property
    def dense_top1(self) -> float | None:
        """Accuracy of the dense network: the run's own baseline, or that of the dense runs beside it."""
        row = self.variant("dense")
        return row.top1 if row and row.top1 is not None else self.baseline_top1

    @property
    def evaluated_on(self) -> str:
        """The images that each epoch is evaluated on: "test", or "held-out" ones of the training images."""
        return "held-out" if self.config.data.holdout else "test"

    @property
    def finetuned(self) -> bool:
        return any(row.phase == "finetune" for row in self.epochs)

    @property
    def compact_top1(self) -> float | None:
        """Accuracy of the compact network, or of the network that it equals."""
        for name in ("compact", "masked"):
            row = self.variant(name)
            if row is not None and row.top1 is not None:
                return row.top1
        return self.last.top1 if self.last else None


def load_run(run_dir: Path | str) -> Run:
    """Read RUN/result.json, or RUN/metrics.jsonl and RUN/config.toml where the run has not finished.

    Raises:
        FileFormatError: Neither file exists, or one of them is not what softprune writes.
    """
    folder = RunFolder(run_dir)
    if folder.result.exists():
        return Run.model_construct(path=folder.path, **dict(folder.read_result()))
    if folder.metrics.exists():
        return _in_training(folder)
    raise FileFormatError(
        f"A run folder must hold result.json, or metrics.jsonl while the run is in training. Got {folder.path} with "
        "neither. Give the folder that `softprune train` wrote."
    )


def best_latencies(run: Run) -> tuple[float, float] | None:
    """Milliseconds of the dense and the compact network of a finished run, for as many images as in its record.

    They are those of bench.json in the setting in which the compact network is fastest, or else of the record. Other
    widths than the run was cut to do not count, since its costs are of those.
    """
    file = RunFolder(run.path).bench
    if not file.exists():
        return run.latencies
    bench = parse(BenchFile, read_bytes(file), str(file), "Run `softprune bench` again, or remove the file.")
    rows = [row for row in bench.rows if row.batch == run.latency_batch and row.round_to in (0, run.round_to)]
    times = [(row.dense["median_ms"], row.compact["median_ms"]) for row in rows if row.dense and row.compact]
    return min(times, key=lambda pair: pair[1], default=run.latencies)


def _in_training(folder: RunFolder) -> Run:
    epochs, cut_off = read_metrics(folder.metrics)
    if not epochs:
        raise FileFormatError(
            f"A report needs at least one finished epoch. Got {folder.metrics} without a complete line. Wait for the "
            "first epoch to end."
        )
    config = folder.read_config() if folder.config.exists() else RunConfig()
    tested = [row for row in epochs if row.test_top1 is not None]
    best = best_epoch(epochs)
    notes = ["The last line of metrics.jsonl is incomplete and was left out."] if cut_off else []
    notes.append(
        "This run has not finished. What is removed is measured against its first recorded epoch, and layers, channels "
        "and the compact network appear when it ends."
    )
    return Run.model_construct(
        path=folder.path,
        name=config.name or folder.path.name,
        model=config.model.name,
        data=config.data.name,
        method=config.method.name,
        seed=config.seed,
        command="",
        finished="",
        wall_seconds=sum(row.seconds for row in epochs),
        # The dense network is not recorded yet; the first epoch, when nearly all is kept, stands in.
        dense=totals_of(epochs[0]),
        compact=totals_of(epochs[-1]),
        best=None if best is None else Moment.of(best),
        last=Moment.of(tested[-1]) if tested else None,
        epochs=epochs,
        config=config,
        in_progress=True,
        notes=tuple(notes),
    )


def read_metrics(path: Path) -> tuple[tuple[Epoch, ...], bool]:
    """Return the epochs of a metrics.jsonl in order, and whether its last line is incomplete (and left out).

    A line that a resumed run wrote again replaces the earlier one.
    """
    rows: dict[int, Epoch] = {}
    *lines, rest = read_bytes(path).split(b"\n")
    for number, line in enumerate(lines, start=1):
        row = parse(Epoch, line, f"{path}, line {number}", "Resume the run, which writes the file again.")
        rows[row.epoch] = row
    return tuple(rows[key] for key in sorted(rows)), bool(rest)
