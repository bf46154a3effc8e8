"""Widths per layer before and after: a row per site, and for deep networks a skyline of all of them."""

from __future__ import annotations

from collections.abc import Sequence

from softprune.report.figures import Canvas, bar, cell, figure, fold, section, svg, table, twice, y_axis
from softprune.report.formats import count, cut, percent
from softprune.report.markup import Markup, el, join, num
from softprune.report.naming import stages
from softprune.report.scales import Scale, ticks
from softprune.report.signs import MINUS
from softprune.runs.records import Run, Site

#: Above this many sites the rows are folded away under the skyline.
ROWS_SHOWN = 32


def widths(run: Run) -> Markup | None:
    if not run.sites:
        return None
    before, after = sum(site.width for site in run.sites), sum(site.kept for site in run.sites)
    emptied = sum(site.kept == 0 for site in run.sites)
    lead = f"{len(run.sites)} masked layers had {count(before)} channels and keep {count(after)}."
    if emptied:
        lead += f" {emptied} of them {'is' if emptied == 1 else 'are'} empty and gone altogether."
    rows = _rows(run.sites)
    deep = len(run.sites) > ROWS_SHOWN
    shown = [twice(lambda canvas: _skyline(canvas, run.sites)), key()] if deep else [key(), rows]
    folded = fold(f"All {len(run.sites)} layers, one row each", rows) if deep else None
    return section("widths", "Width of every layer, before and after", lead, figure("widths", *shown), folded)


def key() -> Markup:
    """What the two tones of a paired bar mean; shared with the figure of the MACs."""
    return el(
        "ul",
        el("li", el("span", class_="swatch is"), "kept"),
        el("li", el("span", class_="swatch was"), "removed"),
        class_="legend",
    )


def _rows(sites: Sequence[Site]) -> Markup:
    largest = max(site.width for site in sites)
    rows = []
    for position, site in enumerate(sites):
        removed = cut(site.width, site.kept)
        rows.append(
            el(
                "tr",
                el("th", site.name, scope="row", data_value=str(position)),
                el("td", bar(site.width, site.kept, largest), class_="wide-cell"),
                cell(count(site.kept), site.kept),
                cell(count(site.width), site.width),
                cell(f"{MINUS if removed else ''}{percent(removed, 0)}", removed),
            )
        )
    head = [("Layer", ""), ("", "wide-cell"), ("Kept", "n"), ("Width", "n"), ("Removed", "n")]
    return table(head, rows, "Channels kept per layer", "sortable bars")


def _skyline(canvas: Canvas, sites: Sequence[Site]) -> Markup:
    """A column per layer in the order of the network; above its width and what it keeps, below the share."""
    left, right, top, bottom, foot = 38, canvas.width - 6, 18, 178, 276
    largest = max(site.width for site in sites)
    scale = Scale(0, largest, bottom, top)
    pitch = (right - left) / len(sites)
    thickness = max(pitch - (1.0 if pitch > 3 else 0.35), 0.6)
    shares = Scale(0, 100, foot, bottom + 34)
    was, now = [], []
    for position, site in enumerate(sites):
        x = left + position * pitch
        was += [_column(x, thickness, scale(site.width), bottom), _column(x, thickness, shares(100), foot)]
        now.append(_column(x, thickness, scale(site.kept), bottom))
        now.append(_column(x, thickness, shares(100 * site.kept / site.width), foot))
    # One path per tone draws; the invisible columns only carry the names for the pointer.
    targets = [
        el(
            "rect",
            el("title", f"{site.name}: {site.kept} of {site.width} kept"),
            x=left + position * pitch,
            y=top,
            width=pitch,
            height=foot - top,
            class_="target",
        )
        for position, site in enumerate(sites)
    ]
    emptied = [
        el("circle", cx=left + (position + 0.5) * pitch, cy=foot + 4, r=1.8, class_="emptied")
        for position, site in enumerate(sites)
        if site.kept == 0
    ]
    chart = svg(
        f"chart {canvas.name}",
        canvas.width,
        foot + 30,
        "Channels before and after, layer by layer",
        f"{len(sites)} layers in the order of the network",
        y_axis(scale, ticks(0, largest, 4), left, right),
        el("text", "channels", x=left, y=10, class_="axis"),
        y_axis(shares, [0, 50, 100], left, right),
        el("text", "kept, % of each layer", x=left, y=bottom + 26, class_="axis"),
        el("path", d="".join(was), class_="was"),
        el("path", d="".join(now), class_="is"),
        *emptied,
        _bands(sites, left, pitch, foot),
        *(targets if not canvas.narrow else ()),
    )
    return chart


def _column(x: float, width: float, top: float, bottom: float) -> str:
    return f"M{num(x, 2)} {num(bottom)}V{num(top)}h{num(width, 2)}V{num(bottom)}z" if top < bottom else ""


def _bands(sites: Sequence[Site], left: float, pitch: float, bottom: float) -> Markup:
    """The stages under the columns, named where there is room for the name."""
    marks, x = [], float(left)
    for name, members in stages([site.name for site in sites]):
        end = x + members * pitch
        marks.append(el("line", x1=x + 1, x2=end - 1, y1=bottom + 9, y2=bottom + 9, class_="band"))
        if name and end - x > 6.5 * len(name):
            marks.append(el("text", name, x=(x + end) / 2, y=bottom + 24, class_="tick middle"))
        x = end
    return join(marks)
