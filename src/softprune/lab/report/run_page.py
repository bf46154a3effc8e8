"""The page of one run."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from softprune.lab.report.layers import ROWS_SHOWN, flow, segments, skyline
from softprune.lab.report.page import Column, write_page
from softprune.lab.report.scales import CANVASES
from softprune.lab.report.table import method_of
from softprune.lab.report.text import MINUS, accuracy, count, file_size, milliseconds, percent, short, significant
from softprune.lab.report.training import epochs_section, precision_of, target_section, training_section, warnings_of
from softprune.lab.runs.folder import Run, load_run
from softprune.lab.runs.result import Totals, Variant

MODULES_SHOWN = 14
"""Modules in the open table of MACs; all of them are in a folded one."""
SAME_LATENCY = 0.97
"""Above this share of the dense latency the compact network counts as not faster."""
EPOCH_COLUMNS = (
    Column("Epoch", lambda row: row.number, str),
    Column("lr", lambda row: row.lr, significant, "n spare"),
    Column("Train loss", lambda row: row.train_loss, partial(significant, digits=4), "n spare"),
    Column("Train top-1", lambda row: row.train_top1, accuracy, "n spare"),
    Column("Test loss", lambda row: row.test_loss, partial(significant, digits=4)),
    Column("Test top-1", lambda row: row.test_top1, accuracy),
    Column("Test top-5", lambda row: row.test_top5, accuracy, "n spare"),
    Column("Channels", lambda row: row.channels, count),
    Column("Parameters", lambda row: row.params, short, "n spare"),
    Column("MACs", lambda row: row.macs, short),
)
VARIANT_COLUMNS = (
    Column("Top-1 %", lambda row: row.top1, accuracy),
    Column("Top-5 %", lambda row: row.top5, accuracy),
    Column("Parameters", lambda row: row.params, count),
    Column("MACs", lambda row: row.macs, count),
    Column("File", lambda row: row.file_bytes, file_size),
    Column("Latency", lambda row: row.latency_ms, milliseconds),
)


def render_run(run_dir: Path | str, out: Path | str | None = None, refresh: int = 0) -> Path:
    """Write a self-contained HTML page about one run to RUN/report.html or `out`, and return its path.

    A finished run is read from result.json, a run that still trains from metrics.jsonl.
    With `refresh`, an open page reloads itself after this many seconds.

    Raises:
        FileFormatError: the folder holds no run, or its records are not what softprune writes.
    """
    run = load_run(run_dir)
    return write_page(
        Path(run_dir) / "report.html" if out is None else Path(out),
        "run.html",
        then="`softprune report` writes it, also elsewhere (--out)",
        title=f"{run.name}: softprune report",
        version=run.environment and run.environment.softprune,
        refresh=refresh,
        run=run,
        method=method_of(run),
        precision=precision_of(run),
        headline=_views(run),
        variants=_variants(run),
        epochs=epochs_section(run),
        epoch_columns=[
            column._replace(label=column.label.replace("Test", run.evaluated_on.capitalize()))
            for column in _filled(EPOCH_COLUMNS, run.epochs)
        ],
        warnings=warnings_of(run),
        target=target_section(run),
        training=training_section(run),
        skylines=[skyline(canvas, run.sites) for canvas in CANVASES] if len(run.sites) > ROWS_SHOWN else [],
        macs=_macs(run),
    )


def _filled(columns: Sequence[Column], rows: Sequence[Any]) -> list[Column]:
    return [column for column in columns if any(column.value(row) is not None for row in rows)]


def _views(run: Run) -> list[tuple[str, str, str, float | None, float | None, Totals]]:
    """Key, label, note, top-1, top-5 and cost of each choice of the switch above the large numbers."""
    views = []
    compact = run.variant("compact")
    if compact is not None:
        note = "the network that was written to disk"
        views.append(("compact", "Compact network", note, run.compact_top1, compact.top5, run.compact))
    for key, label, moment in (("best", "Best epoch", run.best), ("last", "Last epoch", run.last)):
        if moment is not None:
            chosen = f", chosen by {run.evaluated_on} accuracy" if key == "best" else ""
            views.append((key, label, f"epoch {moment.number}{chosen}", moment.top1, moment.top5, moment.totals))
    return views or [("compact", "Network", "", run.compact_top1, None, run.compact)]


def _variants(run: Run) -> dict[str, Any]:
    """The table dense / masked / compact; on a phone counts are short."""
    base, columns = run.variant("dense") or run.variant("masked"), _filled(VARIANT_COLUMNS, run.table)
    masked, compact = run.variant("masked"), run.variant("compact")

    def against(column: Column, row: Variant) -> str:
        """The change of a cost against the dense network."""
        value, dense = column.value(row), base and column.value(base)
        if column.text is accuracy or value is None or not dense or abs(value / dense - 1) < 0.005:
            return ""
        share = 100 * (value / dense - 1)
        return f"{MINUS if share < 0 else '+'}{percent(abs(share), 0)}"

    return {
        "agree": masked and compact and masked.top1 is not None and masked.top1 == compact.top1,
        "columns": columns,
        "phone_columns": [each._replace(text=short) if each.text is count else each for each in columns],
        "names": [(row.name, "n") for row in run.table],
        "against": against,
        "slow": run.method != "dense" and run.speed_up is not None and run.speed_up < 1 / SAME_LATENCY,
    }


def _macs(run: Run) -> dict[str, Any] | None:
    modules = [module for module in run.modules if module.macs_dense > 0]
    if not modules:
        return None
    parts = segments(modules)
    before, after = sum(part["before"] for part in parts), sum(part["after"] for part in parts)
    saved = max(parts, key=lambda part: part["before"] - part["after"])
    lead = f"{short(before)} multiply-accumulates per forward became {short(after)}."
    if before > after:
        share = 100 * (saved["before"] - saved["after"]) / (before - after)
        lead += f" The largest part of the reduction, {percent(share, 0)}, is in {saved['name']}."
    modules.sort(key=lambda module: -module.macs_dense)
    shown = modules[:MODULES_SHOWN] if len(modules) > MODULES_SHOWN + 4 else modules
    drawn = [flow(canvas, parts) for canvas in CANVASES]
    return {"lead": lead, "before": before, "flows": drawn, "modules": modules, "shown": shown}
