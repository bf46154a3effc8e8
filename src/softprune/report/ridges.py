"""A layer's channels as ridges: a bell curve per row, the most alive on top, filled right of delta."""

from __future__ import annotations

import math
from dataclasses import dataclass

from softprune.report.bells import bell, bell_defs
from softprune.report.decisions import Rule
from softprune.report.figures import NARROW, WIDE, Canvas, svg, x_axis
from softprune.report.formats import significant
from softprune.report.markup import Markup, el, join
from softprune.report.scales import Scale, quantile, ticks
from softprune.report.signs import BETA, DELTA, GAMMA
from softprune.runs.records import Site

ROWS = 40
#: Of these rows, what the kept channels get when there are more channels of both kinds than rows.
KEPT_ROWS = 24


@dataclass(frozen=True)
class View:
    """What is drawn of a layer: which channels, in which order, over which range."""

    order: tuple[int, ...]
    low: float
    high: float
    ticks: dict[str, list[float]]


def view_of(site: Site, rule: Rule) -> View:
    """Kept channels first, each kind from the most alive to the most dead, spread evenly where it is thinned."""
    known = [index for index in range(site.width) if math.isfinite(site.beta[index] + site.gamma[index])]
    known.sort(key=lambda index: (rule.delta - site.beta[index]) / (abs(site.gamma[index]) + 1e-8))
    kept = [index for index in known if site.keep[index]]
    dropped = [index for index in known if not site.keep[index]]
    room = min(len(kept), max(KEPT_ROWS, ROWS - len(dropped)))
    low, high = _range(site, known, rule)
    order = (*_thin(kept, room), *_thin(dropped, ROWS - room))
    return View(order, low, high, {WIDE.name: ticks(low, high, 9), NARROW.name: ticks(low, high, 4)})


def tally(site: Site, view: View) -> str:
    drawn = f"; {len(view.order)} drawn, spread evenly" if len(view.order) < site.width else ""
    return f"{site.name}: {site.kept} kept, {site.width - site.kept} dropped{drawn}"


def draw_ridges(canvas: Canvas, site: Site, view: View, rule: Rule) -> Markup:
    """The chart, in a box whose attributes let the script draw another layer in it."""
    split = 260.0 if canvas.narrow else 690.0
    left, top, bottom = 6.0, 60.0, 486.0
    scale = Scale(view.low, view.high, left, split)
    shares = Scale(0.0, 1.0, split + 16.0, canvas.width - 8.0)
    at, least = scale(rule.delta), shares(1 - rule.c)
    identifier = f"ridge-{canvas.name}"
    chart = svg(
        "drawing",
        canvas.width,
        bottom + 42,
        f"Distributions of the channels of {site.name}",
        tally(site, view),
        bell_defs(identifier, left, split, at, 0.0, bottom + 1),
        el("g", x_axis(scale, view.ticks[canvas.name], top - 36, bottom), class_="ridge-axis"),
        el("text", "after BatchNorm", x=split, y=bottom + 34, class_="axis end"),
        x_axis(shares, [0.0, 1.0] if canvas.narrow else [0.0, 0.5, 1.0], top, bottom),
        el("g", *_rows(site, view, rule, identifier, scale, shares, (top, bottom)), class_="rows"),
        el("line", x1=at, x2=at, y1=top - 46, y2=bottom, class_="delta at-delta"),
        el("text", f"{DELTA} = {significant(rule.delta)}", x=at + 6, y=top - 40, class_="label delta-label"),
        el("text", f"share right of {DELTA}", x=shares.end, y=top - 12, class_="axis end"),
        el("line", x1=least, x2=least, y1=top, y2=bottom, class_="delta"),
    )
    places = {"data_left": left, "data_right": split, "data_top": top, "data_bottom": bottom}
    return el(
        "div",
        chart,
        class_=f"chart {canvas.name}",
        data_id=identifier,
        data_from=shares.start,
        data_to=shares.end,
        **places,
    )


def _thin(channels: list[int], rows: int) -> list[int]:
    if len(channels) <= rows:
        return channels
    return [channels[round(row * (len(channels) - 1) / (rows - 1))] for row in range(rows)]


def _range(site: Site, known: list[int], rule: Rule) -> tuple[float, float]:
    """All curves but a few outliers; dead channels may drift out on the left, where nothing happens."""
    starts = [site.beta[index] - 3.2 * abs(site.gamma[index]) for index in known]
    ends = [site.beta[index] + 3.2 * abs(site.gamma[index]) for index in known]
    high = max(quantile(ends, 0.995), rule.delta + 0.1)
    low = min(quantile(starts, 0.02), rule.delta - 0.1)
    return max(low, rule.delta - 2.5 * (high - rule.delta)), high


def _rows(
    site: Site,
    view: View,
    rule: Rule,
    identifier: str,
    scale: Scale,
    shares: Scale,
    frame: tuple[float, float],
) -> list[Markup]:
    """The rows as the script draws them again for another layer: ``ridges`` in page.js must agree."""
    top, bottom = frame
    pitch = (bottom - top) / len(view.order)
    pixels = (scale.end - scale.start) / (scale.high - scale.low)
    rows = []
    for position, index in enumerate(view.order):
        beta, gamma = site.beta[index], abs(site.gamma[index])
        base = top + (position + 1) * pitch
        live = 1.0 - rule.dead_mass(beta, gamma)
        style = "kept" if site.keep[index] else "dropped"
        note = f"channel {index}: {BETA} {significant(beta)}, |{GAMMA}| {significant(gamma)}, {style}"
        curve = bell(identifier, scale(beta), gamma * pixels, base, min(40.0, 2.6 * pitch), style, note)
        share = el(
            "rect",
            x=shares.start,
            y=base - min(pitch * 0.78, 16.0),
            width=max(shares(live) - shares.start, 0.6),
            height=min(pitch * 0.62, 12.0),
            class_=f"share {style}",
        )
        away = None
        if scale(beta) < scale.start:
            away = el("path", d=f"M{scale.start + 1:.0f} {base - 3:.1f}l6 -3v6z", class_=f"away {style}")
        rows.append(join((el("g", curve, clip_path=f"url(#{identifier}-frame)"), share, away)))
    kept = sum(site.keep[index] for index in view.order)
    if kept:
        rows.append(_count(f"{site.kept} kept", "kept", scale.end, top + 12))
    if kept < len(view.order):
        rows.append(
            _count(f"{site.width - site.kept} dropped", "dropped", scale.end, top + kept * pitch + 12)
        )
    return rows


def _count(text: str, style: str, x: float, y: float) -> Markup:
    return el("text", text, x=x, y=y, class_=f"label strong end {style}")
