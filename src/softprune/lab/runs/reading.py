"""A run as reports and comparisons read it: finished, or still in training."""

import shlex
from pathlib import Path
from typing import Annotated

from annotated_types import Gt

from softprune.errors import FileFormatError
from softprune.io import read_bytes
from softprune.lab.config.settings import RunConfig
from softprune.lab.runs.folder import RunFolder
from softprune.lab.runs.result import (
    Environment,
    Epoch,
    Moment,
    Record,
    Result,
    Variant,
    best_epoch,
    numbered_lines,
    parse,
)


class BenchTiming(Record, extra="ignore"):
    """How long one network takes."""

    median_ms: Annotated[float, Gt(0)]


class BenchTimings(Record, extra="ignore"):
    """A row of bench.json: both networks under one backend, precision and batch size."""

    batch: int
    round_to: int = 0
    """Widths were cut to multiples of it; 0: as the run was cut."""
    dense: BenchTiming | None
    compact: BenchTiming | None


class BenchFile(Record, extra="ignore"):
    """What reports read of bench.json, which `softprune bench RUN --out RUN/bench.json` writes."""

    rows: tuple[BenchTimings, ...]


class Run(Result):
    """The record of a finished run, or as much of it as a run in training has."""

    path: Path
    table: tuple[Variant, ...] = ()
    images_per_second: float | None = None  # type: ignore[assignment]
    best: Moment | None = None  # type: ignore[assignment]
    last: Moment | None = None  # type: ignore[assignment]
    environment: Environment | None = None  # type: ignore[assignment]
    in_progress: bool = False
    warnings: tuple[str, ...] = ()
    """What the training warned of, if the record has it."""
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
    if folder.result.is_file():
        return Run.model_construct(path=folder.path, **dict(folder.read_result()))
    if folder.metrics.is_file():
        return _in_training(folder)
    remedy = "Give the folder that `softprune train` wrote."
    if not folder.config.is_file() and any(folder.path.glob("*/result.json")):
        remedy = f"It holds several runs: give one of them, or use `softprune compare {shlex.quote(str(folder.path))}`."
    raise FileFormatError(
        f"A run folder must hold result.json, or metrics.jsonl while the run is in training. Got {folder.path} with "
        f"neither. {remedy}"
    )


def best_latencies(run: Run) -> tuple[float, float] | None:
    """Milliseconds of the dense and the compact network of a finished run, for as many images as in its record.

    They are those of bench.json in the setting in which the compact network is fastest, or else of the record. Other
    widths than the run was cut to do not count, since its costs are of those.
    """
    file = RunFolder(run.path).bench
    if not file.is_file():
        return run.latencies
    bench = parse(BenchFile, read_bytes(file), str(file), "Run `softprune bench` again, or remove the file.")
    rows = [row for row in bench.rows if row.batch == run.latency_batch and row.round_to in (0, run.round_to)]
    times = [(row.dense.median_ms, row.compact.median_ms) for row in rows if row.dense and row.compact]
    return min(times, key=lambda pair: pair[1], default=run.latencies)


def _in_training(folder: RunFolder) -> Run:
    epochs, cut_off = read_metrics(folder.metrics)
    if not epochs:
        raise FileFormatError(
            f"A report needs at least one finished epoch. Got {folder.metrics} without a complete line. Wait for the "
            "first epoch to end."
        )
    config = folder.read_config() if folder.config.is_file() else RunConfig()
    # A run in training has not recorded its dense network; its first epoch, when nearly all is kept, stands in.
    first, final = epochs[0], epochs[-1]
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
        dense=first.totals,
        compact=final.totals,
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
    lines, cut_off = list(numbered_lines(path)), False
    for number, line in lines:
        try:
            row = parse(Epoch, line, f"{path}, line {number}", "Resume the run, which writes the file again.")
            rows[row.epoch] = row
        except FileFormatError:
            if number < lines[-1][0] or read_bytes(path).endswith(b"\n"):
                raise
            cut_off = True
    return tuple(rows[key] for key in sorted(rows)), cut_off
