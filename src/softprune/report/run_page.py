"""The page of one run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from softprune.io import write_atomically
from softprune.report.channels import DropRule, decide, distributions, plane
from softprune.report.curves import ACCURACY, REMOVED, Mark, Series, curves, events_of
from softprune.report.layers import ROWS_SHOWN, flows, segments, skylines
from softprune.report.page import render_page
from softprune.report.text import (
    MINUS,
    accuracy,
    count,
    cut,
    duration,
    file_size,
    milliseconds,
    percent,
    short,
    significant,
    to_the_minute,
)
from softprune.report.training import (
    baseline_of,
    line_of,
    precision_of,
    target_line,
    target_section,
    training_section,
    warnings_of,
)
from softprune.runs.reading import Run, load_run
from softprune.runs.result import Epoch, Totals, Variant

MODULES_SHOWN = 14
"""Modules in the open table of MACs; all of them are in a folded one."""
SAME_LATENCY = 0.97
"""Above this share of the dense latency the compact network counts as not faster."""
MEANINGS = {
    "dense": "the network without masks",
    "masked": "dropped channels multiplied by zero",
    "compact": "dropped channels removed",
}
QUADRANT_TEXTS = (
    ("keep", "Both keep", "It varies, and much of it passes the activation."),
    ("scp", "Only SCP drops", "It varies, but almost all of it lies below δ, where the activation is zero."),
    ("slimming", "Only Slimming drops", "Its scale is small, but its shift carries it through the activation."),
    ("drop", "Both drop", "It hardly varies, and it lies below δ."),
)


class EpochColumn(NamedTuple):
    """A column of the table of epochs."""

    label: str
    value: Callable[[Epoch], float | None]
    text: Callable[[float | None], str]
    kind: str = "n"
    """The class of its cells; "spare": there is no room for it on a phone."""


EPOCH_COLUMNS = (
    EpochColumn("Epoch", lambda row: row.number, str),
    EpochColumn("lr", lambda row: row.lr, significant, "n spare"),
    EpochColumn("Train loss", lambda row: row.train_loss, partial(significant, digits=4), "n spare"),
    EpochColumn("Train top-1", lambda row: row.train_top1, accuracy, "n spare"),
    EpochColumn("Test loss", lambda row: row.test_loss, partial(significant, digits=4)),
    EpochColumn("Test top-1", lambda row: row.test_top1, accuracy),
    EpochColumn("Test top-5", lambda row: row.test_top5, accuracy, "n spare"),
    EpochColumn("Channels", lambda row: row.channels, count),
    EpochColumn("Parameters", lambda row: row.params, short, "n spare"),
    EpochColumn("MACs", lambda row: row.macs, short),
)


def render_run(
    run_dir: Path | str, out: Path | str | None = None, titles: Mapping[str, str] | None = None, refresh: int = 0
) -> Path:
    """Write a self-contained HTML page about one run to RUN/report.html or `out`, and return its path.

    A finished run is read from result.json, a run that still trains from metrics.jsonl. `titles` names the methods.
    With `refresh`, an open page reloads itself after this many seconds.

    Raises:
        FileFormatError: the folder holds no run, or its records are not what softprune writes.
    """
    run = load_run(run_dir)
    target = Path(out) if out is not None else Path(run_dir) / "report.html"
    write_atomically(target, run_page(run, titles, refresh).encode(), then="`softprune report` writes it")
    return target


def run_page(run: Run, titles: Mapping[str, str] | None = None, refresh: int = 0) -> str:
    """The HTML of the page."""
    decisions = decide(run.sites, DropRule(run.config.masks.delta, run.config.masks.c), recorded=run.method == "scp")
    return render_page(
        "run.html",
        title=f"{run.name}: softprune report",
        version=run.environment and run.environment.softprune,
        refresh=refresh,
        run=run,
        method=(titles or {}).get(run.method, run.method),
        run_facts=_facts(run),
        headline=_views(run),
        variants=_variants(run),
        epochs=_epochs(run),
        warnings=warnings_of(run),
        target=target_section(run),
        training=training_section(run),
        widths=_widths(run),
        macs=_macs(run),
        decisions=decisions,
        distributions=distributions(run, decisions) if decisions else None,
        plane=plane(run, decisions) if decisions else None,
        kinds=QUADRANT_TEXTS,
    )


def _facts(run: Run) -> list[tuple[str, str]]:
    return [
        ("seed", str(run.seed)),
        ("epochs", str(len(run.epochs)) if run.epochs else ""),
        ("trained in", duration(run.wall_seconds)),
        ("images/s", "" if run.images_per_second is None else count(run.images_per_second)),
        ("precision", precision_of(run)),
        ("on", run.environment.device if run.environment else ""),
        ("finished", to_the_minute(run.finished)),
    ]


@dataclass(frozen=True)
class Headline:
    """One choice of the switch above the large numbers."""

    key: str
    label: str
    note: str
    top1: float | None
    top5: float | None
    totals: Totals

    @property
    def switch(self) -> tuple[str, str]:
        return self.key, self.label


def _views(run: Run) -> list[Headline]:
    views = []
    compact = run.variant("compact")
    if compact is not None:
        note = "the network that was written to disk"
        views.append(Headline("compact", "Compact network", note, run.compact_top1, compact.top5, run.compact))
    for key, label, moment in (("best", "Best epoch", run.best), ("last", "Last epoch", run.last)):
        if moment is not None:
            note = f"epoch {moment.number}"
            note += f", chosen by {run.evaluated_on} accuracy" if key == "best" else ""
            views.append(Headline(key, label, note, moment.top1, moment.top5, moment.totals))
    return views or [Headline("compact", "Network", "", run.compact_top1, None, run.compact)]


def _variants(run: Run) -> dict[str, Any]:
    """The table dense / masked / compact: (text, text on a phone, value, change against dense) of every cell."""
    base = run.variant("dense") or run.variant("masked")
    masked, compact = run.variant("masked"), run.variant("compact")
    lead = "The network before pruning, the network during training, and the network you deploy."
    if masked and compact and masked.top1 is not None and masked.top1 == compact.top1:
        lead += f" The masked and the compact network agree: {accuracy(compact.top1)} % top-1 each."
    columns: list[tuple[str, str, Callable[[float | None], str]]] = [
        ("Top-1 %", "top1", accuracy),
        ("Top-5 %", "top5", accuracy),
        ("Parameters", "params", count),
        ("MACs", "macs", count),
        ("File", "file_bytes", file_size),
        ("Latency", "latency_ms", milliseconds),
    ]
    rows = []
    for row in run.table:
        more = ", then fine-tuned" if row.name == "compact" and run.finetuned else ""
        cells = []
        for _, key, write in columns:
            value = getattr(row, key)
            phone = short(value) if write is count else write(value)
            cells.append((write(value), phone, value, _against(row, base, key)))
        rows.append({"name": row.name, "meaning": MEANINGS[row.name] + more, "cells": cells})
    return {
        "lead": lead,
        "rows": rows,
        "columns": [(label, "n") for label, _, _ in columns],
        "names": [(row.name, "n") for row in run.table],
        "latency": _latency(run),
    }


def _latency(run: Run) -> dict[str, Any]:
    """The conditions of the latencies, and whether the compact network is not faster."""
    if run.speed_up is None:
        return {"caption": "", "slow": False}
    device = run.environment.device if run.environment else "the device of the run"
    slow = run.method != "dense" and run.speed_up < 1 / SAME_LATENCY
    return {"caption": f"Latency: one forward pass of {run.latency_batch} images on {device}.", "slow": slow}


def _against(row: Variant, base: Variant | None, key: str) -> str:
    value, dense = getattr(row, key), getattr(base, key, None)
    if key in ("top1", "top5") or value is None or not dense or abs(value / dense - 1) < 0.005:
        return ""
    share = 100 * (value / dense - 1)
    return f"{MINUS if share < 0 else '+'}{percent(abs(share), 0)}"


def _epochs(run: Run) -> dict[str, Any] | None:
    dense, baseline = run.dense, baseline_of(run)
    lines = [
        line_of(run, f"{run.evaluated_on} top-1", "s-test", ACCURACY, lambda row: row.test_top1),
        line_of(run, "train top-1", "s-train", ACCURACY, lambda row: row.train_top1),
    ]
    if baseline is not None:
        lines.append(line_of(baseline, "dense top-1", "s-dense", ACCURACY, lambda row: row.test_top1))
    shares: tuple[tuple[str, str, Callable[[Totals], float | None]], ...] = (
        ("parameters", "s-params", lambda totals: cut(dense.params, totals.params)),
        ("channels", "s-channels", lambda totals: cut(dense.channels, totals.channels)),
        ("MACs", "s-macs", lambda totals: cut(dense.macs, totals.macs)),
    )
    for name, style, share in shares:
        values = tuple(share(row.totals) for row in run.epochs)
        at = tuple(row.number for row in run.epochs)
        lines.append(Series(f"{name} removed", style, REMOVED, at, values))
    lines += target_line(run)
    if not any(line.known for line in lines):
        return None
    events, best, last = events_of(run.epochs), run.best, run.epochs[-1]
    mark = None
    if best is not None:
        mark = Mark(best.number, best.top1, f"best {accuracy(best.top1)}, epoch {best.number}")
    description = (
        f"In epoch {last.number}: {run.evaluated_on} top-1 {accuracy(last.test_top1)} percent, "
        f"{percent(cut(dense.macs, last.totals.macs))} of the MACs removed"
    )
    title = "Accuracy and share removed against epochs"
    return {
        "lead": "Above, the accuracy of the network with its masks; below, the share that they remove. "
        + ("Dotted lines mark changes of the training." if events else "Both share one axis."),
        "chart": curves("epochs", lines, title, description, events, mark, end_labels=True),
        "head": [(each.label.replace("Test", run.evaluated_on.capitalize()), each.kind) for each in EPOCH_COLUMNS],
        "columns": EPOCH_COLUMNS,
    }


def _widths(run: Run) -> dict[str, Any]:
    before, after = sum(site.width for site in run.sites), sum(site.kept for site in run.sites)
    emptied = sum(site.kept == 0 for site in run.sites)
    lead = f"{len(run.sites)} masked layers had {count(before)} channels and keep {count(after)}."
    if emptied:
        lead += f" {emptied} of them {'is' if emptied == 1 else 'are'} empty and removed completely."
    return {"lead": lead, "skylines": skylines(run.sites) if len(run.sites) > ROWS_SHOWN else []}


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
    return {"lead": lead, "before": before, "flows": flows(parts), "modules": modules, "shown": shown}
