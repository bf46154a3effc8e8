"""The progress of a run: a live display in a terminal, lines in a pipe."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from softprune.lab.cli.output import console, format_cut, format_percent, say
from softprune.lab.runs.result import Epoch, Totals
from softprune.lab.train.control import Listener
from softprune.log import is_rank_0


def _tell(text: str) -> None:
    with suppress(OSError):  # a run outlives its terminal, and a full disk of its output
        say(text)


class _EpochLines(Listener):
    def __init__(self) -> None:
        self._epochs = 0

    def on_phase(self, text: str) -> None:
        _tell(text)

    def on_epoch_start(self, epoch: int, epochs: int, steps: int) -> None:
        self._epochs = epochs

    def on_epoch(self, row: Epoch, dense: Totals) -> None:
        parts = [f"epoch {row.number}/{self._epochs}", f"lr {row.lr:.2g}", f"loss {format_percent(row.train_loss, 4)}"]
        if row.penalty is not None:
            parts.append(f"penalty {row.penalty:.4f}")
        if row.test_top1 is not None:
            parts.append(f"top-1 {format_percent(row.test_top1)}%")
        if row.macs != dense.macs:
            parts.append(f"MACs cut {format_cut(dense.macs, row.macs)}%")
        _tell("  ".join([*parts, f"{row.images_per_second:,.0f} img/s"]))


class _EpochBar(_EpochLines):
    """Shows a bar with the newest epoch's figures; phases and log lines are printed above it."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress
        self._task: TaskID | None = None
        self._steps = self._epoch = 0

    def on_phase(self, text: str) -> None:
        self._end_bar()
        super().on_phase(text)

    def on_epoch_start(self, epoch: int, epochs: int, steps: int) -> None:
        super().on_epoch_start(epoch, epochs, steps)
        self._epoch, self._steps = epoch, steps
        if self._task is None:
            self._task = self._progress.add_task("", total=epochs * steps, facts="", epoch="")
            self._progress.update(self._task, completed=epoch * steps)
        self._progress.update(self._task, epoch=f"epoch {epoch + 1}/{epochs}")

    def on_step(self, done: int) -> None:
        if self._task is not None:
            self._progress.update(self._task, completed=self._epoch * self._steps + done)

    def on_epoch(self, row: Epoch, dense: Totals) -> None:
        if self._task is None:
            return
        facts = [f"loss {format_percent(row.train_loss, 3)}"]
        if row.penalty is not None:
            facts.append(f"penalty {row.penalty:.3f}")
        if row.test_top1 is not None:
            facts.append(f"top-1 {format_percent(row.test_top1, 1)}%")
        if row.macs != dense.macs:
            facts.append(f"cut {format_cut(dense.macs, row.macs)}%")
        self._progress.update(self._task, facts="  ".join(facts))
        if row.number == self._epochs:
            self._end_bar()
            super().on_epoch(row, dense)

    def _end_bar(self) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None


@contextmanager
def run_progress() -> Iterator[Listener]:
    """Yield the listener for this output. Of several processes only rank 0 prints."""
    if not is_rank_0():
        yield Listener()
        return
    if not console().is_terminal:
        yield _EpochLines()
        return
    columns = (
        TextColumn("{task.fields[epoch]}"),
        BarColumn(bar_width=16),
        TextColumn("{task.fields[facts]}"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console(), transient=True) as progress:
        yield _EpochBar(progress)
