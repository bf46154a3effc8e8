"""Accuracy against MACs: the runs, their means, the dense networks, and the Pareto front."""

from collections.abc import Callable, Sequence
from itertools import pairwise, product
from typing import Any, NamedTuple

from softprune.lab.report.grouping import Experiment, spread
from softprune.lab.report.scales import CANVASES, Canvas, Scale, limits, line_path, ticks
from softprune.lab.runs.reading import Run


class Spot(NamedTuple):
    """A network by cost and accuracy."""

    macs: float
    top1: float


def _spot(macs: float, top1: float | None) -> Spot | None:
    return None if top1 is None else Spot(macs, top1)


VIEWS: tuple[tuple[str, str, Callable[[Run], Spot | None]], ...] = (
    ("last", "Compact network", lambda run: _spot(run.compact.macs, run.compact_top1)),
    ("best", "Best epoch", lambda run: Spot(run.best.macs, run.best.top1) if run.best else None),
)
"""Key and label of each choice of the switch, and the spot of a run."""


def front(spots: Sequence[Spot]) -> list[Spot]:
    """The Pareto front, cheapest first: spots that no other matches with fewer MACs or beats at the same."""
    kept: list[Spot] = []
    for spot in sorted(spots, key=lambda each: (each.macs, -each.top1)):
        if not kept or spot.top1 > kept[-1].top1:
            kept.append(spot)
    return kept


def pareto_views(groups: Sequence[Experiment]) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """Key, label and drawings for the template "pareto", for each choice of the switch."""
    return [
        (key, label, [_drawing(canvas, groups, get) for canvas in CANVASES])
        for key, label, get in VIEWS
        if any(get(run) for group in groups for run in group.runs)
    ]


def _drawing(canvas: Canvas, groups: Sequence[Experiment], get: Callable[[Run], Spot | None]) -> dict[str, Any]:
    left, right, top, bottom = 46, canvas.width - 14, 28, 400
    runs = [[spot for run in group.runs if (spot := get(run))] for group in groups]
    dense = sorted({spot for group in groups for run in group.runs if (spot := _spot(run.dense.macs, run.dense_top1))})
    everything = [*(spot for spots in runs for spot in spots), *dense]
    low, high = limits([spot.top1 for spot in everything], pad=0.12)
    high, most = min(high, 100.0), max(spot.macs for spot in everything) * 1.04
    scale_x = Scale(0.0, most, left, right)
    scale_y = Scale(low, high, bottom, top, ticks=ticks(low, high, 6))
    drawn = [_group(index, spots, scale_x, scale_y) for index, spots in enumerate(runs) if spots]
    best = front([group["mean"] for group in drawn])
    corners = [(scale_x(spot.macs), scale_y(spot.top1)) for spot in best]
    rings = [(scale_x(spot.macs), scale_y(spot.top1), spot) for spot in dense]
    millions = ticks(0.0, most / 1e6, 4 if canvas.narrow else 8)
    labels = [] if canvas.narrow else _labels(drawn, groups, _obstacles(drawn, rings, corners), scale_x, scale_y)
    return {
        "canvas": canvas,
        "runs": len(everything) - len(dense),
        "x": Scale(0.0, most / 1e6, left, right, ticks=millions),
        "y": scale_y,
        "front": line_path(corners) if len(best) > 1 else "",
        "dense": rings,
        "groups": drawn,
        "labels": labels,
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
    drawn: Sequence[dict[str, Any]],
    groups: Sequence[Experiment],
    obstacles: Sequence[tuple[float, float]],
    scale_x: Scale,
    scale_y: Scale,
) -> list[dict[str, Any]]:
    """A label beside each mean, at the place that covers the fewest points, lines and labels."""
    left, right, top, bottom = scale_x.start, scale_x.end, scale_y.end, scale_y.start
    taken = [(x, y, 1) for x, y in obstacles]
    labels = []
    for group in drawn:
        width = 7.2 * len(groups[group["index"]].label)
        places = []
        for dy, end in product((-8.0, 5.0, 18.0, -22.0, 32.0, -36.0), (False, True)):
            x, y = group["x"] + (-12 if end else 12), group["y"] + dy
            start = x - width if end else x
            if left <= start and start + width <= right and top <= y - 12 and y + 4 <= bottom:
                covered = sum(
                    weight for px, py, weight in taken if start - 4 <= px <= start + width + 4 and y - 14 <= py <= y + 8
                )
                # Places near the point come first.
                places.append((covered + abs(dy) / 100, start, {"index": group["index"], "x": x, "y": y, "end": end}))
        if places:
            _, start, label = min(places, key=lambda place: place[0])
            labels.append(label)
            taken += [(start + width * step / 8, label["y"] - 4, 9) for step in range(9)]
    return labels


def _obstacles(
    drawn: Sequence[dict[str, Any]], dense: Sequence[tuple[float, float, Spot]], front: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    """Points on everything that a label must not cover."""
    found = [(x, y) for x, y, _ in dense]
    lines = list(pairwise(front))
    for group in drawn:
        found += [(group["x"], group["y"]), *group["points"]]
        if group["whiskers"]:
            low, high, bottom, top = group["whiskers"]
            lines += [((low, group["y"]), (high, group["y"])), ((group["x"], bottom), (group["x"], top))]
    for (x1, y1), (x2, y2) in lines:
        found += [(x1 + (x2 - x1) * step / 20, y1 + (y2 - y1) * step / 20) for step in range(21)]
    return found
