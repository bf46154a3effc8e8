"""What every figure shares: the frame with its caption, the SVG root, axes, lines, legends.

Colours are classes, never values: the style sheet gives each its light, dark and printed form. Type keeps its
size because a chart is drawn twice, for a desk and for a phone, and the style sheet shows the one that fits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from softprune.report.markup import Child, Markup, el, join, num, raw
from softprune.report.scales import Scale, tick_label


@dataclass(frozen=True)
class Canvas:
    """One of the two drawings: its class in the style sheet and its width in pixels."""

    name: str
    width: int

    @property
    def narrow(self) -> bool:
        return self.name == "narrow"


WIDE = Canvas("wide", 880)
NARROW = Canvas("narrow", 360)


def svg(name: str, width: float, height: float, title: str, description: str, *children: Child) -> Markup:
    """An SVG root that scales with its column and says in words what it shows."""
    return el(
        "svg",
        el("title", title),
        el("desc", description),
        *children,
        class_=name,
        viewBox=f"0 0 {num(width)} {num(height)}",
        role="img",
        aria_label=f"{title}. {description}",
    )


def twice(draw: Callable[[Canvas], Markup]) -> Markup:
    return join((draw(WIDE), draw(NARROW)))


def figure(identifier: str, *children: Child, caption: Child = None, data: object = None) -> Markup:
    """A figure; ``data`` is what its script reads for read-outs, as JSON that no parser takes for markup."""
    return el(
        "figure",
        *children,
        None if data is None else _data(data),
        el("figcaption", caption) if caption else None,
        id=identifier,
    )


def section(identifier: str, title: str, lead: Child, *children: Child) -> Markup:
    heading = el("h2", title, id=f"{identifier}-title")
    return el(
        "section", heading, el("p", lead, class_="lead"), *children, aria_labelledby=f"{identifier}-title"
    )


def x_axis(scale: Scale, values: Sequence[float], top: float, bottom: float, label: str = "") -> Markup:
    """Ticks and their numbers under the plot, hair lines through it, the name at the right end."""
    marks = []
    for value in values:
        x = scale(value)
        marks.append(el("line", x1=x, x2=x, y1=top, y2=bottom, class_="grid"))
        marks.append(el("text", tick_label(value, values), x=x, y=bottom + 17, class_="tick middle"))
    name = el("text", label, x=scale.end, y=bottom + 34, class_="axis end") if label else None
    return el("g", *marks, name, aria_hidden="true")


def y_axis(scale: Scale, values: Sequence[float], left: float, right: float, unit: str = "") -> Markup:
    marks = []
    for value in values:
        y = scale(value)
        marks.append(el("line", x1=left, x2=right, y1=y, y2=y, class_="grid"))
        marks.append(el("text", tick_label(value, values) + unit, x=left - 7, y=y + 4, class_="tick end"))
    return el("g", *marks, aria_hidden="true")


def line_path(points: Iterable[tuple[float, float] | None], class_: str) -> Markup:
    """A polyline that breaks where a value is unknown; a value alone between two gaps is drawn as a dot."""
    parts: list[str] = []
    start = True
    for point in points:
        if point is None:
            start = True
            continue
        parts.append(f"{'M' if start else 'L'}{num(point[0])} {num(point[1])}{'h0' if start else ''}")
        start = False
    return el("path", d="".join(parts), class_=f"line {class_}")


def apart(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places for labels: near those wanted, in their order, ``gap`` from each other, inside [low, high]."""
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    placed = [0.0] * len(wanted)
    floor = low
    for index in order:
        placed[index] = max(wanted[index], floor)
        floor = placed[index] + gap
    ceiling = high
    for index in reversed(order):
        placed[index] = min(placed[index], ceiling)
        ceiling = placed[index] - gap
    return placed


def legend(entries: Iterable[tuple[str, str]], class_: str = "") -> Markup:
    """(style class, label) pairs, each with a stroke as it looks in the chart."""
    items = [
        el(
            "li",
            el("svg", line_path([(1, 6), (21, 6)], style), viewBox="0 0 22 12", aria_hidden="true"),
            label,
        )
        for style, label in entries
    ]
    return el("ul", *items, class_=f"legend {class_}".strip())


def bar(before: float, after: float, largest: float) -> Markup:
    """A paired bar for a table cell: what was, and on it what is left. Stretches with the cell."""
    share = 100.0 / largest if largest > 0 else 0.0
    return el(
        "svg",
        el("rect", x=0, y=1, width=f"{num(before * share, 2)}%", height=12, class_="was"),
        el("rect", x=0, y=1, width=f"{num(after * share, 2)}%", height=12, class_="is"),
        class_="bar",
        aria_hidden="true",
    )


def cell(text: Child, value: float | None = None, class_: str = "n") -> Markup:
    """A number in a table: written for reading, with the record's own value for sorting."""
    return el("td", text, class_=class_, data_value=None if value is None else repr(value))


def table(head: Sequence[tuple[str, str]], rows: Iterable[Markup], caption: str, class_: str = "") -> Markup:
    """A table that scrolls inside its column; ``head`` gives (label, class of the column)."""
    cells = [el("th", label, scope="col", class_=kind or None) for label, kind in head]
    return el(
        "div",
        el(
            "table",
            el("caption", caption, class_="hidden"),
            el("thead", el("tr", *cells)),
            el("tbody", *rows),
            class_=f"data {class_}".strip(),
        ),
        class_="scroll",
        tabindex="0",
        role="region",
        aria_label=caption,
    )


def fold(summary: str, *children: Child, open_: bool = False) -> Markup:
    return el("details", el("summary", summary), *children, open=open_)


def _data(value: object) -> Markup:
    # "<" is the only character that could end the element; as \u003c it is the same JSON.
    text = json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return raw(f'<script type="application/json">{text}</script>')
