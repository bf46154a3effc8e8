"""Watching a run: a progress bar in a terminal, a line per epoch elsewhere."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from softprune.cli.output import console, cut, percent, run_begins, say, speaks
from softprune.train.progress import Listener


class LineListener(Listener):
    """One plain line per epoch."""

    def __init__(self) -> None:
        self._epochs = 0

    def on_stage(self, text: str) -> None:
        say(text)

    def on_epoch_start(self, epoch: int, epochs: int, steps: int) -> None:
        self._epochs = epochs

    def on_epoch(self, row: Mapping[str, Any], dense: Mapping[str, Any]) -> None:
        say(_epoch_line(row, dense, self._epochs))


class BarListener(LineListener):
    """A bar that counts steps, with the epochs' lines above it."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress
        self._task: TaskID | None = None
        self._steps = self._epoch = 0

    def on_stage(self, text: str) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None
        super().on_stage(text)

    def on_epoch_start(self, epoch: int, epochs: int, steps: int) -> None:
        super().on_epoch_start(epoch, epochs, steps)
        self._epoch, self._steps = epoch, steps
        if self._task is None:
            self._task = self._progress.add_task("training", total=epochs * steps)

    def on_step(self, done: int) -> None:
        if self._task is not None:
            self._progress.update(self._task, completed=self._epoch * self._steps + done)


@contextmanager
def make_listener() -> Iterator[Listener]:
    """The listener that suits where the output goes; of several processes only the first one speaks."""
    run_begins()
    if not speaks():
        yield Listener()
        return
    if not console().is_terminal:
        yield LineListener()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console(), transient=True) as progress:
        yield BarListener(progress)


def _epoch_line(row: Mapping[str, Any], dense: Mapping[str, Any], epochs: int) -> str:
    parts = [f"epoch {row['epoch'] + 1}/{epochs}", f"lr {row['lr']:.4g}", f"loss {row['train_loss']:.4f}"]
    if row["test_top1"] is not None:
        parts.append(f"top-1 {percent(row['test_top1'])}%")
    if row["macs"] is not None and row["macs"] != dense["macs"]:
        parts.append(f"MACs cut {cut(dense['macs'], row['macs'])}%")
        parts.append(f"channels cut {cut(dense['channels'], row['channels'])}%")
    parts.append(f"{row['images_per_second']:,.0f} images/s")
    return "  ".join(parts)
