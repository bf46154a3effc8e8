"""Watching a sweep: a table of its runs in a terminal, a line per change elsewhere."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.live import Live
from rich.table import Table

from softprune.cli.output import console, count, percent, run_begins, say
from softprune.sweep.runner import Job, SweepListener


class _Lines(SweepListener):
    """One plain line when a run starts or ends."""

    def on_change(self, job: Job) -> None:
        say("  ".join([f"{job.state:<8}", job.cell.name, *_facts(job)]))


class _Screen(SweepListener):
    """A table of all runs that follows them."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def on_look(self, jobs: Sequence[Job]) -> None:
        table = Table(title_justify="left")
        for column in ("run", "state", "epoch", "top-1 %", "MACs", "time"):
            table.add_column(column, justify="left" if column in ("run", "state") else "right")
        for job in jobs:
            table.add_row(job.cell.name, job.state, *_cells(job))
        self._live.update(table)


@contextmanager
def make_sweep_listener() -> Iterator[SweepListener]:
    """The listener that suits where the output goes."""
    run_begins()
    if not console().is_terminal:
        yield _Lines()
        return
    with Live(console=console(), refresh_per_second=2) as live:
        yield _Screen(live)


def _cells(job: Job) -> list[str]:
    row = job.last_row() if job.state != "waiting" else None
    time = f"{job.seconds:,.0f} s" if job.seconds else "-"
    if row is None:
        return ["-", "-", "-", time]
    epochs = job.cell.config.train.epochs + job.cell.config.finetune.epochs
    return [f"{row['epoch'] + 1}/{epochs}", percent(row["test_top1"]), count(row["macs"]), time]


def _facts(job: Job) -> list[str]:
    if job.state == "running":
        return []
    epoch, top1, macs, time = _cells(job)
    facts = [f"epoch {epoch}", f"top-1 {top1}%", f"{macs} MACs", time]
    return facts if job.state == "done" else [*facts, *job.last_words(1)]
