"""Lines against epochs in panels over one axis, for a run and for a comparison."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from softprune.lab.report.scales import CANVASES, Canvas, Scale, apart, limits, line_path, quantile, ticks
from softprune.lab.report.text import accuracy, removed, significant
from softprune.lab.runs.folder import Run
from softprune.lab.runs.result import Epoch

Event = tuple[int, str]
"""Epoch and label of a change of the training."""
Mark = tuple[int, float, str]
"""Epoch, value and label of a point on the first panel."""


@dataclass(frozen=True)
class Panel:
    """One of the stacked axes."""

    title: str
    kind: str = "value"
    """"accuracy" and "removed" are percentages; "value" is any number; "log" has a logarithmic axis."""
    height: float = 150.0

    @property
    def percent(self) -> bool:
        return self.kind in ("accuracy", "removed")

    def text(self, value: float) -> str:
        return {"accuracy": accuracy, "removed": removed}.get(self.kind, significant)(value)


ACCURACY = Panel("top-1 accuracy, %", "accuracy", 210.0)
REMOVED = Panel("removed, % of the dense network", "removed")


@dataclass(frozen=True)
class Series:
    """One line: its panel, its style class, and (epoch, value) of its points (None: not measured)."""

    label: str
    style: str
    panel: Panel
    points: Sequence[tuple[int, float | None]]
    group: int | None = None
    """The legend entry that shows and hides the line."""
    background: bool = False
    """Drawn and not read out."""

    @property
    def known(self) -> list[float]:
        return [value for _, value in self.points if value is not None]


def line_of(run: Run, label: str, style: str, panel: Panel, get: Callable[[Epoch], float | None]) -> Series:
    """A line over the epochs of a run."""
    return Series(label, style, panel, [(row.number, get(row)) for row in run.epochs])


def events_of(rows: Sequence[Epoch]) -> list[Event]:
    """Where the learning rate drops from one plateau to the next, and where fine-tuning begins."""
    found = []
    tuning = next((row.number for row in rows if row.phase == "finetune"), None)
    for position in range(1, len(rows)):
        before, now = rows[position - 1].lr, rows[position].lr
        if rows[position].number == tuning:
            found.append((tuning, "fine-tuning"))
        elif now < 0.95 * before:
            level_before = position < 2 or rows[position - 2].lr == before
            level_after = position + 1 == len(rows) or rows[position + 1].lr == now
            if level_before and level_after:
                found.append((rows[position].number, f"lr {significant(now)}"))
    return found if len(found) <= 8 else []


def curves(
    lines: Sequence[Series], title: str, description: str, events: Sequence[Event] = (), mark: Mark | None = None
) -> dict[str, Any] | None:
    """The chart for the template "curves": geometry for both canvases, and data for the script; None without values."""
    lines = [line for line in lines if line.known]
    if not lines:
        return None
    panels = list(dict.fromkeys(line.panel for line in lines))
    named = [line for line in lines if not line.background]
    epochs = sorted({epoch for line in lines for epoch, _ in line.points})
    return {
        "title": title,
        "description": description,
        "legend": [(line.style, line.label) for line in named],
        "drawings": [_drawing(canvas, lines, epochs, events, mark) for canvas in CANVASES],
        "data": {"x": epochs, "series": [_read_out(line, panels, epochs) for line in named]},
    }


def _read_out(line: Series, panels: Sequence[Panel], epochs: Sequence[int]) -> dict[str, Any]:
    """What the script says of a line, over the epochs of all lines."""
    shown = {
        epoch: round(value, 2) if line.panel.percent else float(f"{value:.4g}")
        for epoch, value in line.points
        if value is not None
    }
    return {
        "label": line.label,
        "style": line.style,
        "panel": panels.index(line.panel),
        "group": line.group,
        "percent": line.panel.percent,
        "y": [shown.get(epoch) for epoch in epochs],
    }


def _drawing(
    canvas: Canvas, lines: Sequence[Series], epochs: Sequence[int], events: Sequence[Event], mark: Mark | None
) -> dict[str, Any]:
    # Lines of a comparison are named by the legend that shows and hides them, others at their end.
    labelled = not canvas.narrow and all(line.group is None for line in lines)
    left, right = (44, canvas.width - 10) if canvas.narrow else (50, canvas.width - (156 if labelled else 12))
    first, last = epochs[0], epochs[-1]
    shown = [value for value in ticks(first, last, 5 if canvas.narrow else 8) if value == int(value)]
    scale_x = Scale(first, max(last, first + 1), left, right, ticks=shown)
    bottom = -4.0
    drawn: list[dict[str, Any]] = []
    for panel in dict.fromkeys(line.panel for line in lines):
        members = [line for line in lines if line.panel == panel]
        top, bottom = bottom + 30.0, bottom + 30.0 + panel.height
        scale = _scale(panel, members, bottom, top)
        ends = apart([scale.clamp(line.known[-1]) for line in members], 17, scale.end + 2, scale.start)
        labels = list(zip(members, ends, strict=True)) if labelled else []
        pixels = [[(scale_x(x), scale(y)) for x, y in line.points if y is not None] for line in members]
        paths = list(zip(members, map(line_path, pixels), strict=True))
        drawn.append({"panel": panel, "scale": scale, "paths": paths, "labels": labels})
    first_lines = [line for line in lines if line.panel == lines[0].panel]
    return {
        "canvas": canvas,
        "x": scale_x,
        "panels": drawn,
        "events": _place_events(events, scale_x, canvas),
        "mark": _place_mark(mark, scale_x, drawn[0]["scale"], first_lines) if mark else None,
    }


def _scale(panel: Panel, lines: Sequence[Series], bottom: float, top: float) -> Scale:
    """The axis of a panel, which shows every value."""
    values = [value for line in lines for value in line.known]
    low, high = limits(values)
    if panel.kind == "removed":
        most = max(values)
        low, high = min(0.0, *values), 100.0 if most > 50 else max(10.0, most * 1.1)
    elif panel.kind == "log" and min(values) > 0 and max(values) > 20 * min(values):
        low, high = min(values) / 1.3, max(values) * 1.3
        powers = [10.0**exponent for exponent in range(-12, 13)]
        return Scale(low, high, bottom, top, "log", [power for power in powers if low <= power <= high])
    elif panel.kind in ("value", "log"):
        low = min(0.0, *values)
    else:
        low, high = max(low, 0.0), min(high, 100.0)
        if high - low > 4 * (high - quantile(values, 0.25)) and high - low > 20:
            return Scale(low, high, bottom, top, "error", _error_ticks(low, high))
    return Scale(low, high, bottom, top, ticks=ticks(low, high, 5 if panel.height > 200 else 4))


def _error_ticks(low: float, high: float) -> list[float]:
    """Round accuracies that keep their distance on an axis of the error's square root."""
    scale = Scale(low, high, 0.0, 1.0, "error")
    found: list[float] = []
    for value in (99.0, 98.0, 95.0, 90.0, 80.0, 70.0, 60.0, 50.0, 30.0, 10.0, 0.0):
        if low <= value <= high and (not found or scale(found[-1]) - scale(value) > 0.12):
            found.append(value)
    return found[::-1]


def _place_events(events: Sequence[Event], scale_x: Scale, canvas: Canvas) -> list[tuple[float, str]]:
    """(pixel, label). A label that would cover another one is left out, those of the learning rate first."""
    taken: list[tuple[float, float]] = []
    labels = dict.fromkeys(events, "")
    for event in sorted(events, key=lambda event: event[1].startswith("lr")):
        x, half = scale_x(event[0]), 3.4 * len(event[1])
        if x + half < canvas.width and all(x + half < start or x - half > end for start, end in taken):
            taken.append((x - half, x + half))
            labels[event] = event[1]
    return [(scale_x(epoch), labels[epoch, label]) for epoch, label in events]


def _place_mark(mark: Mark, scale_x: Scale, scale_y: Scale, lines: Sequence[Series]) -> dict[str, Any]:
    """The point and its label, placed in the lower part of the panel where no curve passes."""
    epoch, value, label = mark
    x, y = scale_x(epoch), scale_y(value)
    late = x > (scale_x.start + scale_x.end) / 2
    width = 7.0 * len(label)
    left, right = (x - width, x + 3) if late else (x - 3, x + width)
    heights = [
        scale_y(value)
        for line in lines
        for epoch, value in line.points
        if value is not None and left - 8 <= scale_x(epoch) <= right + 8
    ]
    lowest = max([*heights, y])
    label_y = lowest + 20 if lowest + 20 < scale_y.start - 2 else min(heights, default=y) - 10
    return {"x": x, "y": y, "label": label, "label_x": x + (3 if late else -3), "label_y": label_y, "late": late}
