"""Render a self-contained HTML page with tables and SVG charts.

markupsafe escapes everything that comes from a record. The content security policy blocks all network requests.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from softprune.errors import printable
from softprune.io import write_atomically

Point = tuple[float, float]
HUES = 7
MARGIN = 0.05
"""Margin of an axis on each side, as a share of the range of its values."""


class Card(NamedTuple):
    """A large number at the top of a page."""

    title: str
    text: str
    value: float | None
    below: str
    meter: Markup = Markup()


class Part(NamedTuple):
    """A section of a page, left out if its body is empty."""

    name: str
    title: str
    lead: str
    body: Markup


class Column(NamedTuple):
    """A column of a table: its head, and how to get and format the value of a row."""

    label: str
    value: Callable[[Any], Any]
    text: Callable[[Any], str] = str
    kind: str = "n"
    """CSS class of its cells. Class "spare" hides the column on small screens."""


def write_page(target: Path, *, then: str, **parts: Any) -> Path:
    """Render the template ``page.html`` with ``parts`` to a file; ``then`` is the remedy if the disk is full."""
    environment = Environment(
        loader=PackageLoader(__package__, ""),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
    )
    html = environment.get_template("page.html").render(parts)
    write_atomically(target, html.encode(errors="replace"), then=then)  # folder names may not be valid Unicode
    return target


def _shown(value: Any) -> Any:
    """Escape control characters in text, such as those that change the text direction."""
    return printable(value, "\n\t") if isinstance(value, str) and not isinstance(value, Markup) else value


def tag(template: str, *values: Any) -> Markup:
    """Format an HTML template with values, which are escaped unless they are Markup."""
    return Markup(template).format(*map(_shown, values))


def join(parts: Iterable[str]) -> Markup:
    """Join pieces of HTML; strings that are not Markup are escaped."""
    return Markup("").join(map(_shown, parts))


def table(caption: str, columns: Sequence[Column], rows: Iterable[Any]) -> Markup:
    """Return a table. The first cell of each row is its header, and numeric cells have a data-value attribute."""
    head = join(tag('<th scope="col" class="{}">{}</th>', each.kind, each.label) for each in columns)
    lines = join(tag("<tr>{}</tr>\n", join(_cell(each, row, each is columns[0]) for each in columns)) for row in rows)
    frame = (
        '<div class="scroll" tabindex="0" role="region" aria-label="{0}"><table><caption class="hidden">{0}</caption>'
    )
    return tag(frame + "<thead><tr>{1}</tr></thead>\n<tbody>{2}</tbody></table></div>", caption, head, lines)


def _cell(column: Column, row: Any, is_head: bool) -> Markup:
    value = column.value(row)
    number = tag(' data-value="{}"', repr(value)) if isinstance(value, int | float) else ""
    text = value if isinstance(value, Markup) else column.text(value)
    return tag('<th scope="row"{1}>{2}</th>' if is_head else '<td class="{0}"{1}>{2}</td>', column.kind, number, text)


def bar(before: float, after: float, largest: float) -> Markup:
    """Return a bar of the value before the cut, overlaid with the value after it."""
    rects = '<rect width="{}%" height="100%" class="was"/><rect width="{}%" height="100%" class="is"/>'
    widths = (_num(100 * value / (largest or 1)) for value in (before, after))
    return tag('<svg class="bar" aria-hidden="true">' + rects + "</svg>", *widths)


def style_of(index: int) -> str:
    """Return the CSS classes for colour and dash of an experiment: seven hues, dashed from the eighth on."""
    return f"g{index % HUES} dash{min(index // HUES, 2)}"


@dataclass(frozen=True)
class Series:
    """A line or a set of points, with label and CSS class. The y of a point is None if not measured."""

    label: str
    style: str
    points: Sequence[tuple[float, float | None]]

    @property
    def known(self) -> list[Point]:
        return [(x, y) for x, y in self.points if y is not None]

    @property
    def mean(self) -> Point:
        return fmean(x for x, _ in self.known), fmean(y for _, y in self.known)


@dataclass(frozen=True)
class Axis:
    """Maps values to percent of the plot area, after applying ``warp`` (the logarithm for a log axis)."""

    low: float
    high: float
    ticks: Sequence[float]
    warp: Callable[[float], float] = float

    def __call__(self, value: float) -> float:
        low, high = self.warp(self.low), self.warp(self.high)
        return 100 * (self.warp(value) - low) / (high - low)


def axis(values: Sequence[float], *, from_zero: bool = False, log: bool = False, zoom: bool = False) -> Axis:
    """Return an axis that covers all values, or with ``zoom`` all but the lowest tenth."""
    low, high = sorted(values)[len(values) // 10] if zoom else min(values), max(values)
    if log and low > 0 and high > 20 * low:
        powers = [10.0**power for power in range(-12, 13) if low / 1.3 <= 10.0**power <= high * 1.3]
        return Axis(low / 1.3, high * 1.3, powers, math.log10)
    room = (high - low) * MARGIN or abs(high) * 0.1 or 1.0
    low, high = min(0.0, low) if from_zero or log else low - room, high + room
    return Axis(low, high, _ticks(low, high))


def _ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Return about ``wanted`` round values in [low, high]."""
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    steps = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    return [round(index * step, 12) for index in steps]


def curves(
    title: str,
    lines: Sequence[Series],
    text: Callable[[float], str] = "{:.4g}".format,
    *,
    events: Sequence[tuple[int, str]] = (),
    **kind: bool,
) -> Markup:
    """Return a line chart over epochs with a tooltip per epoch; empty if no value is known."""
    lines = [line for line in lines if line.known]
    if not lines:
        return Markup()
    epochs = sorted({epoch for line in lines for epoch, _ in line.points})
    first, last = epochs[0], max(epochs[-1], epochs[0] + 1)
    x = Axis(first, last, [tick for tick in _ticks(first, last, 6) if tick == int(tick)])
    y = axis([value for line in lines for _, value in line.known], **kind)
    mark = '<line x1="{0}%" x2="{0}%" y2="100%" class="event"><title>{1}</title></line>'
    marks = join(tag(mark, _num(x(epoch)), label) for epoch, label in events)
    found = [(line.label, dict(line.known)) for line in lines]
    wide, strips = 100 / (last - first), []
    for epoch in epochs:
        said = "\n".join(f"{label}: {text(values[epoch])}" for label, values in found if epoch in values)
        strip = '<rect x="{}%" width="{}%" height="100%" class="strip"><title>epoch {}\n{}</title></rect>'
        left, right = max(x(epoch) - wide / 2, 0.0), min(x(epoch) + wide / 2, 100.0)
        strips.append(tag(strip, _num(left), _num(right - left), epoch, said))
    return _plot(title, "epoch", lines, x, y, join([marks, _stretched(lines, x, y), *strips]), "plot")


def scatter(title: str, unit: str, groups: Sequence[Series], dense: Series, front: Sequence[Point]) -> Markup:
    """Return a scatter chart: points and mean of each group, dense networks as rings, and the Pareto front."""
    everything = [spot for group in (*groups, dense) for spot in group.known]
    if not any(group.known for group in groups):
        return Markup()
    most = 1.04 * max(x for x, _ in everything)
    x, y = Axis(0.0, most, _ticks(0.0, most)), axis([top1 for _, top1 in everything])

    def dot(spot: Point, kind: str, radius: float, label: str) -> Markup:
        place = _num(x(spot[0])), _num(100 - y(spot[1]))
        said = f"{label}: {spot[1]:.2f}%, {spot[0]:,.4g} {unit}"
        return tag('<circle cx="{}%" cy="{}%" r="{}" class="{}"><title>{}</title></circle>', *place, radius, kind, said)

    dots = [_stretched([Series("", "front", front)], x, y), *(dot(spot, "ring", 5, "dense") for spot in dense.known)]
    for group in groups:
        dots += [dot(spot, f"point {group.style}", 3, group.label) for spot in group.known]
        dots += [dot(group.mean, f"mean {group.style}", 6, group.label)] if group.known else []
    return _plot(title, unit, groups, x, y, join(dots), "plot tall")


def _plot(title: str, unit: str, legend: Iterable[Series], x: Axis, y: Axis, body: Markup, kind: str) -> Markup:
    """Return a chart with title, legend, grid and labels. Its lines scale with the page, its text does not."""
    entry = '<li><svg viewBox="0 0 22 12" aria-hidden="true"><path d="M1 6h20" class="{}"/></svg>{}</li>'
    row = '<line x2="100%" y1="{0}%" y2="{0}%" class="grid"/><text x="-8" y="{0}%" dy="0.35em" class="end">{1}</text>'
    column = '<text x="{}%" y="100%" dy="1.6em" class="middle">{}</text>'
    return tag(
        '<figure><h3>{0}</h3><ul class="legend">{1}</ul><svg class="{2}" role="img" aria-label="{0}">{3}{4}{5}'
        '<text x="100%" y="100%" dy="2.9em" class="end">{6}</text></svg></figure>',
        *(title, join(tag(entry, each.style, each.label) for each in legend), kind),
        join(tag(row, _num(100 - y(tick)), f"{tick:,g}") for tick in y.ticks),
        join(tag(column, _num(x(tick)), f"{tick:,g}") for tick in x.ticks),
        *(body, unit),
    )


def _stretched(lines: Sequence[Series], x: Axis, y: Axis) -> Markup:
    """Return lines in an SVG of 100 x 100 units, stretched to the size of the chart. A single point becomes a dot."""
    paths = []
    for line in lines:
        places = [f"{_num(x(across))} {_num(100 - y(up))}" for across, up in line.known]
        paths.append(tag('<path d="M{}L{}" class="{}"/>', places[0], "L".join(places), line.style))
    return tag('<svg viewBox="0 0 100 100" preserveAspectRatio="none">{}</svg>', join(paths))


def _num(value: float) -> str:
    """Format a coordinate with at most two decimals, without trailing zeros or a negative zero."""
    return f"{round(value, 2) + 0.0:.12g}"
