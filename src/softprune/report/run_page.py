"""The page of one run."""

from __future__ import annotations

from pathlib import Path

from softprune.files import write_atomically

from .decisions import decide, rule_of
from .document import document
from .markup import Markup, el
from .reading import load_run
from .records import Run
from .sections.appendix import appendix
from .sections.epochs import epochs
from .sections.gaussians import gaussians
from .sections.headline import headline
from .sections.macs import macs
from .sections.quadrants import quadrants
from .sections.variants import variants
from .sections.widths import widths


def render_run(run_dir: Path | str, out: Path | str | None = None) -> Path:
    """Write a self-contained HTML page about one run, RUN/report.html or ``out``, and give its path.

    Works on a finished run (result.json), and on one under way (metrics.jsonl) with what there is so far.

    Raises:
        FileFormatError: the folder holds no run, or its records are not what softprune writes.
    """
    run = load_run(run_dir)
    target = Path(out) if out is not None else Path(run_dir) / "report.html"
    write_atomically(target, run_page(run).encode(), then="`softprune report` writes it")
    return target


def run_page(run: Run) -> str:
    """The page's HTML."""
    decisions = decide(run.sites, rule_of(run.masks), recorded=run.method == "scp")
    parts = (
        headline(run),
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
