"""A run as reports and comparisons read it: finished, or still in training."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from softprune.config.recipes import config_to_dict
from softprune.config.settings import RunConfig
from softprune.errors import FileFormatError
from softprune.runs.folder import RunFolder
from softprune.runs.result import Epoch, Module, Moment, Result, SiteRecord, Totals, Variant, read_metrics


@dataclass(frozen=True)
class Run:
    """The records of one run. What a run in training does not have yet is None or empty."""

    path: Path
    name: str
    model: str
    data: str
    method: str
    seed: int | None
    dense: Totals
    compact: Totals
    command: str = ""
    finished: str = ""
    wall_seconds: float | None = None
    images_per_second: float | None = None
    best: Moment | None = None
    last: Moment | None = None
    table: tuple[Variant, ...] = ()
    sites: tuple[SiteRecord, ...] = ()
    modules: tuple[Module, ...] = ()
    epochs: tuple[Epoch, ...] = ()
    masks: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    sessions: tuple[Mapping[str, Any], ...] = ()
    result: Result | None = None
    """The whole record of a finished run."""
    in_progress: bool = False
    notes: tuple[str, ...] = ()
    baseline_top1: float | None = None
    """Accuracy of dense runs compared with this one, for a run that trained no dense network itself."""

    def variant(self, name: str) -> Variant | None:
        """Return a row of the table dense / masked / compact."""
        return next((row for row in self.table if row.name == name), None)

    @property
    def dense_top1(self) -> float | None:
        """Accuracy of the dense network: the run's own baseline, or that of the dense runs beside it."""
        row = self.variant("dense")
        return row.top1 if row and row.top1 is not None else self.baseline_top1

    @property
    def evaluated_on(self) -> str:
        """The images that each epoch is evaluated on: "test", or "held-out" ones of the training images."""
        data = self.config.get("data", {})
        return "held-out" if isinstance(data, Mapping) and data.get("holdout") else "test"

    @property
    def finetuned(self) -> bool:
        """Whether the compact network was fine-tuned."""
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
        return _finished(folder)
    if folder.metrics.is_file():
        return _in_training(folder)
    raise FileFormatError(
        f"A run folder must hold result.json, or metrics.jsonl while the run is in training. Got {folder.path} with "
        "neither. Give the folder that `softprune train` wrote."
    )


def _finished(folder: RunFolder) -> Run:
    result = folder.read_result()
    config = config_to_dict(result.config)
    copied = (
        *("name", "model", "data", "method", "command", "seed", "finished", "wall_seconds"),
        *("images_per_second", "dense", "compact", "best", "last", "table", "sites", "modules", "epochs"),
    )
    return Run(
        path=folder.path,
        **{name: getattr(result, name) for name in copied},
        masks=config["masks"],
        config=config,
        environment=result.environment.model_dump(),
        sessions=tuple(session.model_dump() for session in result.sessions),
        result=result,
    )


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
    best = max(tested, key=lambda row: row.test_top1 or 0.0, default=None)
    notes = ["The last line of metrics.jsonl is incomplete and was left out."] if cut_off else []
    notes.append(
        "This run has not finished. What is removed is measured against its first recorded epoch, and layers, channels "
        "and the compact network appear when it ends."
    )
    values = config_to_dict(config)
    return Run(
        path=folder.path,
        name=config.name or folder.path.name,
        model=config.model.name,
        data=config.data.name,
        method=config.method.name,
        seed=config.seed,
        wall_seconds=sum(row.seconds for row in epochs),
        dense=first.totals,
        compact=final.totals,
        best=None if best is None else Moment.of(best),
        last=Moment.of(tested[-1]) if tested else None,
        epochs=epochs,
        masks=values["masks"],
        config=values,
        in_progress=True,
        notes=tuple(notes),
    )
