"""Lines against epochs in panels over one axis, for a run and for a comparison."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from softprune.report.scales import CANVASES, Canvas, Scale, apart, limits, line_path, quantile, ticks
from softprune.report.text import accuracy, removed, significant
from softprune.runs.result import Epoch


@dataclass(frozen=True)
class Panel:
    """One of the stacked axes."""

    title: str
    kind: str = "value"
    """"accuracy" and "removed" are percentages; "value" is any number; "log" has a logarithmic axis."""
    height: float = 150.0

    def text(self, value: float) -> str:
        if self.kind == "accuracy":
            return accuracy(value)
        return removed(value) if self.kind == "removed" else significant(value)


ACCURACY = Panel("top-1 accuracy, %", "accuracy", 210.0)
REMOVED = Panel("removed, % of the dense network", "removed")


@dataclass(frozen=True)
class Series:
    """One line: its panel, its style class, and its value in each of its epochs (None: not measured)."""

    label: str
    style: str
    panel: Panel
    at: tuple[int, ...]
    values: tuple[float | None, ...]
    group: int | None = None
    """The legend entry that shows and hides the line."""
    background: bool = False
    """Drawn and not read out."""

    @property
    def known(self) -> list[float]:
        return [value for value in self.values if value is not None]


@dataclass(frozen=True)
class Mark:
    """A labelled point on the first panel."""

    epoch: int
    value: float
    label: str


def events_of(rows: Sequence[Epoch]) -> list[tuple[int, str]]:
    """(epoch, label) where the learning rate drops from one plateau to the next, and where fine-tuning begins."""
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
    name: str,
    lines: Sequence[Series],
    title: str,
    description: str,
    events: Sequence[tuple[int, str]] = (),
    mark: Mark | None = None,
    end_labels: bool = False,
) -> dict[str, Any]:
    """The chart for the template "curves": geometry for both canvases, and data for the script."""
    lines = [line for line in lines if line.known]
    panels = list(dict.fromkeys(line.panel for line in lines))
    return {
        "name": name,
        "title": title,
        "description": description,
        "legend": [(line.style, line.label) for line in lines if not line.background],
        "drawings": [_drawing(canvas, name, lines, panels, events, mark, end_labels) for canvas in CANVASES],
        "data": _data(lines, panels),
    }


def _data(lines: Sequence[Series], panels: Sequence[Panel]) -> dict[str, Any]:
    """What the script reads out: every line over the epochs of all of them."""
    at = sorted({epoch for line in lines for epoch in line.at})
    series = []
    for line in lines:
        if line.background:
            continue
        values = dict(zip(line.at, line.values, strict=True))
        series.append(
            {
                "label": line.label,
                "style": line.style,
                "panel": panels.index(line.panel),
                "group": line.group,
                "percent": line.panel.kind in ("accuracy", "removed"),
                "y": [_rounded(values.get(epoch), line.panel) for epoch in at],
            }
        )
    return {"x": at, "series": series}


def _rounded(value: float | None, panel: Panel) -> float | None:
    if value is None:
        return None
    return round(value, 2) if panel.kind in ("accuracy", "removed") else float(f"{value:.4g}")


def _drawing(
    canvas: Canvas,
    name: str,
    lines: Sequence[Series],
    panels: Sequence[Panel],
    events: Sequence[tuple[int, str]],
    mark: Mark | None,
    end_labels: bool,
) -> dict[str, Any]:
    labelled = end_labels and not canvas.narrow
    left, right = (44, canvas.width - 10) if canvas.narrow else (50, canvas.width - (156 if labelled else 12))
    epochs = [epoch for line in lines for epoch in line.at]
    first, last = min(epochs), max(epochs)
    scale_x = Scale(first, max(last, first + 1), left, right)
    top, bottom = 26.0, -4.0
    drawn: list[dict[str, Any]] = []
    for index, panel in enumerate(panels):
        members = [line for line in lines if line.panel == panel]
        start, bottom = bottom + 30.0, bottom + 30.0 + panel.height
        scale, values = _scale(panel, members, bottom, start, 5 if panel.height > 200 else 4)
        drawn.append(
            {
                "id": f"{name}-{canvas.name}-{index}",
                "title": panel.title,
                "scale": scale,
                "marks": scale.marks(values),
                "paths": [_path(line, scale_x, scale) for line in members],
                "labels": _end_labels(members, scale) if labelled else [],
            }
        )
    shown = [value for value in ticks(first, last, 5 if canvas.narrow else 8) if value == int(value)]
    return {
        "canvas": canvas,
        "x": scale_x,
        "marks": scale_x.marks(shown),
        "top": top,
        "bottom": bottom,
        "panels": drawn,
        "events": _place_events(events, scale_x, canvas),
        "mark": _place_mark(mark, scale_x, drawn[0]["scale"], lines, panels[0]) if mark else None,
    }


def _scale(panel: Panel, lines: Sequence[Series], bottom: float, top: float, wanted: int) -> tuple[Scale, list[float]]:
    """The axis of a panel, which shows every value, and its ticks."""
    values = [value for line in lines for value in line.known]
    low, high = limits(values, pad=0.05)
    if panel.kind == "removed":
        most = max(values)
        low, high = min(0.0, *values), 100.0 if most > 50 else max(10.0, most * 1.1)
    elif panel.kind == "log" and min(values) > 0 and max(values) > 20 * min(values):
        low, high = min(values) / 1.3, max(values) * 1.3
        powers = [10.0**exponent for exponent in range(-12, 13)]
        return Scale(low, high, bottom, top, "log"), [power for power in powers if low <= power <= high]
    elif panel.kind in ("value", "log"):
        low = min(0.0, *values)
    elif panel.kind == "accuracy":
        low, high = max(low, 0.0), min(high, 100.0)
        if high - low > 4 * (high - quantile(values, 0.25)) and high - low > 20:
            return Scale(low, high, bottom, top, "error"), _error_ticks(low, high)
    return Scale(low, high, bottom, top), ticks(low, high, wanted)


def _error_ticks(low: float, high: float) -> list[float]:
    """Round accuracies that keep their distance on an axis of the error's square root."""
    scale = Scale(low, high, 0.0, 1.0, "error")
    found: list[float] = []
    for value in (99.0, 98.0, 95.0, 90.0, 80.0, 70.0, 60.0, 50.0, 30.0, 10.0, 0.0):
        if low <= value <= high and (not found or scale(found[-1]) - scale(value) > 0.12):
            found.append(value)
    return found[::-1]


def _path(line: Series, scale_x: Scale, scale_y: Scale) -> dict[str, str]:
    points = [
        None if value is None else (scale_x(epoch), scale_y(value))
        for epoch, value in zip(line.at, line.values, strict=True)
    ]
    group = "" if line.group is None else f" group-{line.group}"
    return {"d": line_path(points), "style": f"{line.style}{group}"}


def _end_labels(lines: Sequence[Series], scale: Scale) -> list[dict[str, Any]]:
    named = [line for line in lines if line.label]
    places = apart([scale.clamp(line.known[-1]) for line in named], 17, scale.end + 2, scale.start)
    return [
        {
            "name": line.label.removesuffix(" removed"),
            "value": line.panel.text(line.known[-1]),
            "style": line.style,
            "y": y + 4,
        }
        for line, y in zip(named, places, strict=True)
    ]


def _place_events(events: Sequence[tuple[int, str]], scale_x: Scale, canvas: Canvas) -> list[tuple[float, str]]:
    """(pixel, label). A label that would cover another one is left out, those of the learning rate first."""
    taken: list[tuple[float, float]] = []
    labels = dict.fromkeys(events, "")
    for event in sorted(events, key=lambda event: event[1].startswith("lr")):
        x, half = scale_x(event[0]), 3.4 * len(event[1])
        if x + half < canvas.width and all(x + half < start or x - half > end for start, end in taken):
            taken.append((x - half, x + half))
            labels[event] = event[1]
    return [(scale_x(epoch), labels[epoch, label]) for epoch, label in events]


def _place_mark(mark: Mark, scale_x: Scale, scale_y: Scale, lines: Sequence[Series], panel: Panel) -> dict[str, Any]:
    """The point and its label, placed in the lower part of the panel where no curve passes."""
    x, y = scale_x(mark.epoch), scale_y(mark.value)
    late = x > (scale_x.start + scale_x.end) / 2
    width = 7.0 * len(mark.label)
    left, right = (x - width, x + 3) if late else (x - 3, x + width)
    heights = [
        scale_y(value)
        for line in lines
        if line.panel == panel
        for epoch, value in zip(line.at, line.values, strict=True)
        if value is not None and left - 8 <= scale_x(epoch) <= right + 8
    ]
    lowest = max([*heights, y])
    label_y = lowest + 20 if lowest + 20 < scale_y.start - 2 else min(heights, default=y) - 10
    return {"x": x, "y": y, "label": mark.label, "label_x": x + (3 if late else -3), "label_y": label_y, "late": late}
