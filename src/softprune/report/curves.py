"""Lines against epochs in two panels over one axis: accuracy above, what is removed below.

The page of one run and the comparison of several draw the same shape; they differ in the lines they give it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from softprune.report.figures import Canvas, apart, line_path, svg, x_axis, y_axis
from softprune.report.formats import accuracy, percent, significant
from softprune.report.markup import Markup, el, join
from softprune.report.scales import Scale, limits, quantile, ticks
from softprune.report.signs import MINUS
from softprune.runs.records import Epoch

ACCURACY, REMOVED = 0, 1


@dataclass(frozen=True)
class Series:
    """One line: its panel, its style class, and its value in each of its epochs (``None``: not measured).

    ``group`` is what a legend entry switches; a line in the ``background`` is drawn and not read out.
    """

    label: str
    style: str
    panel: int
    at: tuple[int, ...]
    values: tuple[float | None, ...]
    group: int | None = None
    background: bool = False

    @property
    def known(self) -> list[float]:
        return [value for value in self.values if value is not None]


@dataclass(frozen=True)
class Mark:
    """A point worth naming on the accuracy panel."""

    epoch: int
    value: float
    label: str


def curves_data(lines: Sequence[Series]) -> dict[str, object]:
    """What the script shows under the pointer: every line over the epochs of all of them."""
    at = sorted({epoch for line in lines for epoch in line.at})
    series = []
    for line in lines:
        if line.background:
            continue
        values = dict(zip(line.at, line.values, strict=True))
        shown = [None if (value := values.get(epoch)) is None else round(value, 2) for epoch in at]
        series.append(
            {"label": line.label, "style": line.style, "panel": line.panel, "group": line.group, "y": shown}
        )
    return {"x": at, "series": series}


def events_of(rows: Sequence[Epoch]) -> list[tuple[int, str]]:
    """(epoch from one, label) where the learning rate falls from one plateau to the next, and where fine-tuning begins.

    A rate that falls smoothly has no plateaus and marks nothing.
    """
    found = []
    tuning = next((row.number for row in rows if row.phase == "finetune"), None)
    for position in range(1, len(rows)):
        before, now = rows[position - 1].lr, rows[position].lr
        if rows[position].number == tuning:
            found.append((tuning, "fine-tuning"))
        elif before is not None and now is not None and now < 0.95 * before:
            level_before = position < 2 or rows[position - 2].lr == before
            level_after = position + 1 == len(rows) or rows[position + 1].lr == now
            if level_before and level_after:
                found.append((rows[position].number, f"lr {significant(now)}"))
    return found if len(found) <= 8 else []


def draw_curves(
    canvas: Canvas,
    lines: Sequence[Series],
    title: str,
    description: str,
    events: Sequence[tuple[int, str]] = (),
    mark: Mark | None = None,
    end_labels: bool = False,
) -> Markup:
    """The chart, in a box whose attributes tell the script where the epochs lie."""
    labelled = end_labels and not canvas.narrow
    left, right = (38, canvas.width - 10) if canvas.narrow else (46, canvas.width - (142 if labelled else 12))
    epochs = [epoch for line in lines for epoch in line.at]
    first, last = min(epochs), max(epochs)
    identifier = f"panel-{canvas.name}"
    scale_x = Scale(first, max(last, first + 1), left, right)
    top, middle = 26.0, 236.0
    scales = {ACCURACY: _accuracy_scale(lines, middle, top)}
    bottom = middle
    if any(line.panel == REMOVED for line in lines):
        bottom = middle + 180.0
        scales[REMOVED] = _removed_scale(lines, bottom, middle + 30.0)
    shown = [value for value in ticks(first, last, 5 if canvas.narrow else 8) if value == int(value)]
    parts = [
        x_axis(scale_x, shown, top, bottom, "epoch"),
        *(_event(scale_x(epoch), label, top, bottom) for epoch, label in events),
    ]
    for index, scale in scales.items():
        name = "accuracy, %" if index == ACCURACY else "removed, %"
        parts += [
            y_axis(scale, ticks(scale.low, scale.high, 7 if index == ACCURACY else 4), left, right),
            el("text", name, x=left, y=scale.end - 10, class_="axis"),
            _panel(scale_x, scale, [line for line in lines if line.panel == index], f"{identifier}-{index}"),
        ]
    if mark is not None:
        parts.append(_mark(mark, scale_x, scales[ACCURACY]))
    if labelled:
        parts.append(_end_labels(lines, scales, right + 10))
    parts.append(el("g", class_="cursor"))
    return el(
        "div",
        svg("drawing", canvas.width, bottom + 42, title, description, *parts),
        class_=f"chart {canvas.name}",
        data_left=left,
        data_right=right,
        data_top=top,
        data_bottom=bottom,
        data_first=scale_x.low,
        data_last=scale_x.high,
    )


def _accuracy_scale(lines: Sequence[Series], bottom: float, top: float) -> Scale:
    """Room for what matters: the climb of the first epochs may leave the panel below."""
    values = [value for line in lines if line.panel == ACCURACY for value in line.known]
    if not values:
        return Scale(0.0, 100.0, bottom, top)
    low, high = limits(values, pad=0.04)
    return Scale(max(low, 0.0, quantile(values, 0.04) - 0.1 * (high - low)), min(high, 100.0), bottom, top)


def _removed_scale(lines: Sequence[Series], bottom: float, top: float) -> Scale:
    values = [value for line in lines if line.panel == REMOVED for value in line.known]
    most = max(values, default=0.0)
    return Scale(min(0.0, *values), 100.0 if most > 50 else max(10.0, most * 1.1), bottom, top)


def _panel(scale_x: Scale, scale_y: Scale, lines: Sequence[Series], identifier: str) -> Markup:
    """The lines, cut off at the frame rather than bent along it."""
    drawn = [
        line_path(
            (
                None if value is None else (scale_x(epoch), scale_y(value))
                for epoch, value in zip(line.at, line.values, strict=True)
            ),
            line.style if line.group is None else f"{line.style} group-{line.group}",
        )
        for line in lines
    ]
    box = {"x": scale_x.start - 2, "y": scale_y.end - 2}
    size = {"width": scale_x.end - scale_x.start + 4, "height": scale_y.start - scale_y.end + 4}
    frame = el("clipPath", el("rect", **box, **size), id=identifier)
    places = {
        "data_low": scale_y.low,
        "data_high": scale_y.high,
        "data_bottom": scale_y.start,
        "data_top": scale_y.end,
    }
    return el("g", frame, el("g", *drawn, clip_path=f"url(#{identifier})"), class_="panel", **places)


def _event(x: float, label: str, top: float, bottom: float) -> Markup:
    rule = el("line", x1=x, x2=x, y1=top - 4, y2=bottom, class_="event")
    return join((rule, el("text", label, x=x, y=top - 10, class_="event-label middle")))


def _mark(mark: Mark, scale_x: Scale, scale_y: Scale) -> Markup:
    x, y = scale_x.clamp(mark.epoch), scale_y.clamp(mark.value)
    # The label hangs under the point, on the side where there is room.
    late = x > (scale_x.start + scale_x.end) / 2
    label = el("text", mark.label, x=x + (3 if late else -3), y=y + 26, class_="mark end" if late else "mark")
    return join((el("circle", cx=x, cy=y, r=4.5, class_="best"), label))


def _end_labels(lines: Sequence[Series], scales: dict[int, Scale], x: float) -> Markup:
    labels: list[Markup] = []
    for index, scale in scales.items():
        ends = [(line, line.known[-1]) for line in lines if line.panel == index and line.known]
        places = apart([scale.clamp(value) for _, value in ends], 17, scale.end + 2, scale.start)
        for (line, value), y in zip(ends, places, strict=True):
            name = line.label.removesuffix(" removed")
            shown = (
                accuracy(value) if index == ACCURACY else f"{MINUS if value > 0 else ''}{percent(abs(value))}"
            )
            strong = el("tspan", shown, class_="strong")
            labels.append(el("text", f"{name} ", strong, x=x, y=y + 4, class_=f"label {line.style}"))
    return el("g", *labels, aria_hidden="true")
