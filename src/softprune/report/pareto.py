"""Accuracy against MACs: the runs, their means, the dense networks, and the Pareto front."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from softprune.report.grouping import Group, spread
from softprune.report.scales import CANVASES, Canvas, Scale, apart, limits, num, ticks
from softprune.runs.records import Run


@dataclass(frozen=True)
class Spot:
    macs: float
    top1: float


def _spot(macs: float | None, top1: float | None) -> Spot | None:
    return None if macs is None or top1 is None else Spot(macs, top1)


VIEWS: tuple[tuple[str, str, Callable[[Run], Spot | None]], ...] = (
    ("last", "Compact network", lambda run: _spot(run.compact.macs, run.shipped_top1)),
    ("best", "Best epoch", lambda run: _spot(run.best.totals.macs, run.best.top1) if run.best else None),
)
"""Key and label of each choice of the switch, and the spot of a run."""


def front(spots: Sequence[Spot]) -> list[Spot]:
    """The Pareto front, cheapest first: spots that no other matches with fewer MACs or beats at the same."""
    kept: list[Spot] = []
    for spot in sorted(spots, key=lambda each: (each.macs, -each.top1)):
        if not kept or spot.top1 > kept[-1].top1:
            kept.append(spot)
    return kept


def pareto_views(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """The charts for the template "pareto", one per choice of the switch."""
    return [
        {"switch": (key, label), "drawings": [_drawing(canvas, groups, get) for canvas in CANVASES]}
        for key, label, get in VIEWS
        if any(get(run) for group in groups for run in group.runs)
    ]


def _drawing(canvas: Canvas, groups: Sequence[Group], get: Callable[[Run], Spot | None]) -> dict[str, Any]:
    left, right, top, bottom = 46, canvas.width - 14, 28, 400
    runs = [[spot for run in group.runs if (spot := get(run))] for group in groups]
    dense = sorted(
        {spot for group in groups for run in group.runs if (spot := _spot(run.dense.macs, run.dense_top1))},
        key=lambda spot: (spot.macs, spot.top1),
    )
    everything = [*(spot for spots in runs for spot in spots), *dense]
    low, high = limits([spot.top1 for spot in everything], pad=0.12)
    scale_x = Scale(0.0, max(spot.macs for spot in everything) * 1.04, left, right)
    scale_y = Scale(low, min(high, 100.0), bottom, top)
    drawn = [_group(index, spots, scale_x, scale_y) for index, spots in enumerate(runs) if spots]
    best = front([group["mean"] for group in drawn])
    path = "M" + "L".join(f"{num(scale_x(spot.macs))} {num(scale_y(spot.top1))}" for spot in best)
    millions = Scale(0.0, scale_x.high / 1e6, left, right)
    return {
        "canvas": canvas,
        "runs": len(everything) - len(dense),
        "left": left,
        "right": right,
        "top": top,
        "bottom": bottom,
        "x_marks": millions.marks(ticks(0.0, millions.high, 4 if canvas.narrow else 8)),
        "y_marks": scale_y.marks(ticks(scale_y.low, scale_y.high, 6)),
        "front": path if len(best) > 1 else "",
        "dense": [(scale_x(spot.macs), scale_y(spot.top1), spot) for spot in dense],
        "groups": drawn,
        "labels": [] if canvas.narrow else _labels(drawn, groups, scale_x, scale_y),
    }


def _group(index: int, spots: Sequence[Spot], scale_x: Scale, scale_y: Scale) -> dict[str, Any]:
    macs, top1 = spread(spot.macs for spot in spots), spread(spot.top1 for spot in spots)
    mean = Spot(macs.mean or 0.0, top1.mean or 0.0)
    whiskers: tuple[float, ...] = ()
    if macs.deviation is not None and top1.deviation is not None:
        across = (scale_x(mean.macs - macs.deviation), scale_x(mean.macs + macs.deviation))
        whiskers = (*across, scale_y(mean.top1 - top1.deviation), scale_y(mean.top1 + top1.deviation))
    points = [(scale_x(spot.macs), scale_y(spot.top1)) for spot in spots] if len(spots) > 1 else []
    x, y = scale_x(mean.macs), scale_y(mean.top1)
    return {"index": index, "mean": mean, "x": x, "y": y, "points": points, "whiskers": whiskers}


def _labels(
    drawn: Sequence[dict[str, Any]], groups: Sequence[Group], scale_x: Scale, scale_y: Scale
) -> list[dict[str, Any]]:
    heights = apart([group["y"] for group in drawn], 17, scale_y.end, scale_y.start)
    labels = []
    for group, y in zip(drawn, heights, strict=True):
        late = group["x"] > 0.6 * scale_x.end
        labels.append(
            {"index": group["index"], "x": group["x"] + (-12 if late else 12), "y": y - 8, "end": late}
        )
    return labels
