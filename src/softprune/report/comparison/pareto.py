"""Accuracy against MACs: the runs, their means, the dense networks, and the front that nothing beats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from softprune.report.comparison.legend import group_legend, style_of
from softprune.report.figures import Canvas, apart, figure, section, svg, twice, x_axis, y_axis
from softprune.report.formats import accuracy, short
from softprune.report.grouping import Group, spread
from softprune.report.markup import Markup, el, join, num
from softprune.report.scales import Scale, limits, ticks
from softprune.runs.records import Run


@dataclass(frozen=True)
class Spot:
    macs: float
    top1: float


def _spot(macs: float | None, top1: float | None) -> Spot | None:
    return None if macs is None or top1 is None else Spot(macs, top1)


VIEWS: tuple[tuple[str, str, Callable[[Run], Spot | None]], ...] = (
    ("last", "As shipped", lambda run: _spot(run.compact.macs, run.shipped_top1)),
    ("best", "Best epoch", lambda run: _spot(run.best.totals.macs, run.best.top1) if run.best else None),
)
"""Key and label of each choice of the switch, and what it shows of a run."""


def pareto(groups: Sequence[Group]) -> Markup | None:
    drawn = [
        (key, label, get) for key, label, get in VIEWS if any(get(run) for g in groups for run in g.runs)
    ]
    if not drawn:
        return None
    switch, panels = [], []
    for position, (key, label, get) in enumerate(drawn):
        switch.append(el("input", type="radio", name="view", id=f"view-{key}", checked=position == 0))
        switch.append(el("label", label, for_=f"view-{key}"))
        drawings = twice(partial(_draw, groups=groups, get=get))
        panels.append(el("div", drawings, class_=f"panel panel-{key}"))
    return section(
        "pareto",
        "Accuracy against cost",
        "Up and to the left is better. The dashed line joins the experiments that no other beats in both; "
        "rings are the dense networks.",
        figure("pareto", group_legend(groups, "narrow-only"), el("div", *switch, *panels, class_="views")),
    )


def front(spots: Sequence[Spot]) -> list[Spot]:
    """The spots that no other matches with fewer MACs, or beats at the same; cheapest first."""
    kept: list[Spot] = []
    for spot in sorted(spots, key=lambda each: (each.macs, -each.top1)):
        if not kept or spot.top1 > kept[-1].top1:
            kept.append(spot)
    return kept


def _draw(canvas: Canvas, groups: Sequence[Group], get: Callable[[Run], Spot | None]) -> Markup:
    left, right, top, bottom = 46, canvas.width - 14, 28, 400
    runs = [[spot for run in group.runs if (spot := get(run))] for group in groups]
    dense = {
        spot for group in groups for run in group.runs if (spot := _spot(run.dense.macs, run.dense_top1))
    }
    everything = [spot for spots in runs for spot in spots] + sorted(dense, key=lambda spot: spot.macs)
    low, high = limits([spot.top1 for spot in everything], pad=0.12)
    scale_x = Scale(0.0, max(spot.macs for spot in everything) * 1.04, left, right)
    scale_y = Scale(low, min(high, 100.0), bottom, top)
    means = [
        Spot(spread(s.macs for s in spots).mean or 0.0, spread(s.top1 for s in spots).mean or 0.0)
        if spots
        else None
        for spots in runs
    ]
    best = front([mean for mean in means if mean])
    path = "M" + "L".join(f"{num(scale_x(spot.macs))} {num(scale_y(spot.top1))}" for spot in best)
    x_ticks = ticks(0.0, scale_x.high / 1e6, 4 if canvas.narrow else 8)
    return svg(
        f"chart {canvas.name}",
        canvas.width,
        bottom + 44,
        "Accuracy against MACs",
        f"{len(everything) - len(dense)} runs",
        x_axis(Scale(0.0, scale_x.high / 1e6, left, right), x_ticks, top, bottom, "MACs, millions"),
        y_axis(scale_y, ticks(scale_y.low, scale_y.high, 6), left, right),
        el("text", "top-1 accuracy, %", x=left, y=top - 12, class_="axis"),
        el("path", d=path, class_="front") if len(best) > 1 else None,
        *(_dense(spot, scale_x, scale_y) for spot in sorted(dense, key=lambda spot: (spot.macs, spot.top1))),
        *(_group(i, groups[i], runs[i], mean, scale_x, scale_y) for i, mean in enumerate(means) if mean),
        None if canvas.narrow else _labels(groups, means, scale_x, scale_y),
    )


def _dense(spot: Spot, scale_x: Scale, scale_y: Scale) -> Markup:
    note = el("title", f"dense: {accuracy(spot.top1)} % with {short(spot.macs)} MACs")
    return el("circle", note, cx=scale_x(spot.macs), cy=scale_y(spot.top1), r=5, class_="dense-point")


def _group(
    index: int, group: Group, spots: Sequence[Spot], mean: Spot, scale_x: Scale, scale_y: Scale
) -> Markup:
    x, y = scale_x(mean.macs), scale_y(mean.top1)
    parts = [
        el("circle", cx=scale_x(spot.macs), cy=scale_y(spot.top1), r=3, class_="point")
        for spot in (spots if len(spots) > 1 else ())
    ]
    across, up = spread(spot.macs for spot in spots).deviation, spread(spot.top1 for spot in spots).deviation
    if across is not None and up is not None:
        wide = {"x1": scale_x(mean.macs - across), "x2": scale_x(mean.macs + across)}
        tall = {"y1": scale_y(mean.top1 - up), "y2": scale_y(mean.top1 + up)}
        parts.append(el("line", **wide, y1=y, y2=y, class_="whisker"))
        parts.append(el("line", **tall, x1=x, x2=x, class_="whisker"))
    note = el("title", f"{group.label}: {accuracy(mean.top1)} % with {short(mean.macs)} MACs")
    return el("g", *parts, el("circle", note, cx=x, cy=y, r=6, class_="mean"), class_=style_of(index))


def _labels(groups: Sequence[Group], means: Sequence[Spot | None], scale_x: Scale, scale_y: Scale) -> Markup:
    shown = [(index, mean) for index, mean in enumerate(means) if mean]
    heights = apart([scale_y(mean.top1) for _, mean in shown], 17, scale_y.end, scale_y.start)
    labels = []
    for (index, mean), y in zip(shown, heights, strict=True):
        x = scale_x(mean.macs)
        late = x > 0.6 * scale_x.end
        style = f"point-label {style_of(index)}" + (" end" if late else "")
        labels.append(el("text", groups[index].label, x=x + (-12 if late else 12), y=y - 8, class_=style))
    return join(labels)
