"""Reading a run folder: result.json of a finished run, or metrics.jsonl and config.toml of one under way."""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from softprune.errors import FileFormatError
from softprune.runs.fields import Fields
from softprune.runs.records import Epoch, Module, Moment, Run, Site, Totals, Variant
from softprune.runs.result import RESULT_FORMAT


def load_run(run_dir: Path | str) -> Run:
    """Read and check RUN/result.json, or RUN/metrics.jsonl where the run has not finished.

    Raises:
        FileFormatError: neither file is there, or one of them is not what softprune writes.
    """
    folder = Path(run_dir)
    result = folder / "result.json"
    if result.is_file():
        return _finished(folder, _object(_parse(result.read_bytes(), str(result)), str(result)))
    metrics = folder / "metrics.jsonl"
    if metrics.is_file():
        return _under_way(folder, metrics)
    raise FileFormatError(
        f"A run folder holds result.json, or metrics.jsonl while the run goes on. Got {folder} with neither. "
        "Give the folder that `softprune train` wrote."
    )


def _finished(folder: Path, record: Fields) -> Run:
    version = record.values.get("format")
    if version != RESULT_FORMAT:
        raise FileFormatError(
            f"{record.place}: this softprune reads result format {RESULT_FORMAT}. Got format {version!r}. "
            "Use the softprune version that wrote the run, or run it again."
        )
    notes: list[str] = []
    epochs = tuple(_epoch(row) for row in record.children("epochs"))
    metrics = folder / "metrics.jsonl"
    if not epochs and metrics.is_file():
        epochs = _metrics(metrics, notes)
    return Run(
        path=folder,
        name=record.text("name", folder.name),
        model=record.text("model", "network"),
        data=record.text("data"),
        method=record.text("method"),
        command=_command(record.values.get("command")),
        seed=_integer(record.number("seed")),
        started=record.text("started"),
        finished=record.text("finished"),
        wall_seconds=record.number("wall_seconds"),
        images_per_second=record.number("images_per_second"),
        dense=_totals(record.child("dense")),
        compact=_totals(record.child("compact")),
        best=_moment(record.child("best")),
        last=_moment(record.child("last")),
        table=tuple(_variant(row) for row in record.children("table")),
        sites=tuple(_site(row) for row in record.children("sites")),
        modules=tuple(_module(row) for row in record.children("modules")),
        epochs=epochs,
        masks=_mapping(record.child("masks")),
        config=_mapping(record.child("config")),
        environment=_mapping(record.child("environment")),
        sessions=tuple(_mapping(session) for session in record.children("sessions")),
        notes=tuple(notes),
    )


def _under_way(folder: Path, metrics: Path) -> Run:
    notes: list[str] = []
    epochs = _metrics(metrics, notes)
    if not epochs:
        raise FileFormatError(
            f"A report needs at least one finished epoch. Got {metrics} without a complete line. "
            "Wait for the first epoch to end."
        )
    config: dict[str, Any] = {}
    resolved = folder / "config.toml"
    if resolved.is_file():
        try:
            config = tomllib.loads(resolved.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise FileFormatError(
                f"{resolved} must be TOML. Got an error: {error}. Restore the file or delete it."
            ) from error
    # A run under way has not counted its dense network; its first epoch, when nearly all is kept, stands in.
    first, final = epochs[0], epochs[-1]
    scored = [row for row in epochs if row.test_top1 is not None]
    best = max(scored, key=lambda row: row.test_top1 or 0.0, default=None)
    notes.append(
        "This run has not finished. What is removed is measured against its first recorded epoch, "
        "and layers, channels and the compact network appear when it ends."
    )
    return Run(
        path=folder,
        name=_setting(config, "name") or folder.name,
        model=_setting(config, "model") or "network",
        data=_setting(config, "data"),
        method=_setting(config, "method"),
        command="",
        seed=int(seed) if isinstance(seed := config.get("seed"), int) else None,
        started="",
        finished="",
        wall_seconds=sum(row.seconds or 0.0 for row in epochs) or None,
        images_per_second=None,
        dense=first.totals,
        compact=final.totals,
        best=Moment(best.epoch, best.test_top1, best.test_top5, best.totals) if best else None,
        last=Moment(final.epoch, final.test_top1, final.test_top5, final.totals),
        epochs=epochs,
        config=config,
        in_progress=True,
        notes=tuple(notes),
    )


def _metrics(path: Path, notes: list[str]) -> tuple[Epoch, ...]:
    """The epochs in order; a line that a resumed run wrote again replaces the one before."""
    rows: dict[int, Epoch] = {}
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            record = _object(_parse(line, place), place)
        except FileFormatError:
            if number < len(lines):
                raise
            notes.append("The last line of metrics.jsonl is incomplete and was left out.")
            continue
        epoch = _epoch(record)
        rows[epoch.epoch] = epoch
    return tuple(rows[key] for key in sorted(rows))


def _epoch(row: Fields) -> Epoch:
    return Epoch(
        epoch=_required(row, "epoch"),
        phase=row.text("phase", "train"),
        lr=row.number("lr"),
        strength=row.number("strength"),
        train_loss=row.number("train_loss"),
        train_top1=row.number("train_top1"),
        test_loss=row.number("test_loss"),
        test_top1=row.number("test_top1"),
        test_top5=row.number("test_top5"),
        seconds=row.number("seconds"),
        totals=_totals(row),
    )


def _totals(row: Fields | None) -> Totals:
    if row is None:
        return Totals()
    paper = row.child("paper")
    return Totals(
        macs=row.number("macs"),
        params=row.number("params"),
        channels=row.number("channels"),
        paper_flops=paper.number("flops") if paper else None,
        paper_params=paper.number("params") if paper else None,
        paper_channels=paper.number("channels") if paper else None,
    )


def _moment(row: Fields | None) -> Moment | None:
    if row is None:
        return None
    return Moment(_integer(row.number("epoch")), row.number("top1"), row.number("top5"), _totals(row))


def _variant(row: Fields) -> Variant:
    keys = ("top1", "top5", "params", "macs", "file_bytes", "latency_ms")
    return Variant(row.text("variant"), **{key: row.number(key) for key in keys})


def _site(row: Fields) -> Site:
    site = Site(
        name=row.text("name"),
        activation=row.text("activation"),
        width=_required(row, "width"),
        kept=_required(row, "kept"),
        beta=row.numbers("beta"),
        gamma=row.numbers("gamma"),
        keep=row.flags("keep"),
    )
    for key, values in (("beta", site.beta), ("gamma", site.gamma), ("keep", site.keep)):
        if values and len(values) != site.width:
            raise FileFormatError(
                f"{row.place}: '{key}' must have one entry per channel, {site.width}. Got {len(values)}. "
                "Run again to write the record anew."
            )
    if site.keep and sum(site.keep) != site.kept:
        raise FileFormatError(
            f"{row.place}: 'kept' must be the number of true entries in 'keep', {sum(site.keep)}. "
            f"Got {site.kept}. Run again to write the record anew."
        )
    return site


def _module(row: Fields) -> Module:
    return Module(
        name=row.text("name"),
        kind=row.text("kind"),
        macs_dense=row.number("macs_dense") or 0.0,
        macs_compact=row.number("macs_compact") or 0.0,
        params_dense=row.number("params_dense"),
        params_compact=row.number("params_compact"),
        out_dense=row.number("out_dense"),
        out_compact=row.number("out_compact"),
    )


def _parse(content: bytes, place: str) -> Any:
    try:
        return json.loads(content)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise FileFormatError(
            f"{place}: must be JSON. Got {content[:40]!r}: {error}. It is cut off or was edited; run again."
        ) from error


def _object(value: Any, place: str) -> Fields:
    if not isinstance(value, Mapping):
        raise FileFormatError(
            f"{place}: must be a JSON object. Got {type(value).__name__}. Run again to write it."
        )
    return Fields(value, place)


def _required(row: Fields, key: str) -> int:
    value = row.number(key)
    if value is None or value != int(value):
        raise FileFormatError(
            f"{row.place}: '{key}' must be a whole number. Got {row.values.get(key)!r}. Run again."
        )
    return int(value)


def _integer(value: float | None) -> int | None:
    return None if value is None else int(value)


def _mapping(fields: Fields | None) -> Mapping[str, Any]:
    return fields.values if fields else {}


def _command(value: Any) -> str:
    if isinstance(value, list):
        return shlex.join(str(part) for part in value)
    return "" if value is None else str(value)


def _setting(config: Mapping[str, Any], key: str) -> str:
    """A top-level setting, or the ``name`` in the table of that name (``[model] name = "vgg16"``)."""
    value = config.get(key)
    if isinstance(value, Mapping):
        value = value.get("name")
    return "" if value is None else str(value)
