"""The page of one run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from softprune.io import write_atomically
from softprune.report.decisions import decide, rule_of
from softprune.report.document import document
from softprune.report.markup import Markup, el
from softprune.report.sections.appendix import appendix
from softprune.report.sections.epochs import epochs
from softprune.report.sections.gaussians import gaussians
from softprune.report.sections.headline import headline
from softprune.report.sections.macs import macs
from softprune.report.sections.quadrants import quadrants
from softprune.report.sections.variants import variants
from softprune.report.sections.widths import widths
from softprune.runs.reading import load_run
from softprune.runs.records import Run


def render_run(
    run_dir: Path | str, out: Path | str | None = None, titles: Mapping[str, str] | None = None
) -> Path:
    """Write a self-contained HTML page about one run, RUN/report.html or ``out``, and give its path.

    Works on a finished run (result.json), and on one under way (metrics.jsonl) with what there is so far. `titles`:
    methods in words.

    Raises:
        FileFormatError: the folder holds no run, or its records are not what softprune writes.
    """
    run = load_run(run_dir)
    target = Path(out) if out is not None else Path(run_dir) / "report.html"
    write_atomically(target, run_page(run, titles).encode(), then="`softprune report` writes it")
    return target


def run_page(run: Run, titles: Mapping[str, str] | None = None) -> str:
    """The page's HTML."""
    decisions = decide(run.sites, rule_of(run.masks), recorded=run.method == "scp")
    parts = (
        headline(run, titles or {}),
        variants(run),
        epochs(run),
        widths(run),
        macs(run),
        gaussians(run, decisions),
        quadrants(run, decisions),
        appendix(run),
    )
    return document(f"{run.name}: softprune report", (part for part in parts if part), footer(run))


def footer(run: Run) -> Markup:
    version = run.environment.get("softprune")
    return el(
        "p",
        "Made by softprune",
        f" {version}" if version else None,
        ". This page is one file and fetches nothing.",
    )
