"""Accuracy against a cost: the runs, their means, the dense networks, and the Pareto front."""

from collections.abc import Callable, Sequence
from typing import Any

from softprune.lab.report.grouping import Experiment, spread
from softprune.lab.report.scales import CANVASES, Canvas, Scale, limits, line_path, ticks
from softprune.lab.report.table import Spot, front
from softprune.lab.report.text import milliseconds, short
from softprune.lab.runs.folder import Run, best_latencies

Cost = Callable[[Run], tuple[float, float] | None]
"""Returns the cost of the dense and of the compact network, or None where it was not measured."""


def scatters(groups: Sequence[Experiment]) -> list[dict[str, Any]]:
    """Return the charts of accuracy against MACs and against measured time, for the template "scatter"."""
    charts = [
        _chart("MACs", "millions", short, 1e6, lambda run: (run.dense.macs, run.compact.macs), groups),
        _chart("measured time", "milliseconds", milliseconds, 1.0, best_latencies, groups),
    ]
    return [chart for chart in charts if chart is not None]


def _chart(
    name: str, unit: str, text: Callable[[float | None], str], scale: float, cost: Cost, groups: Sequence[Experiment]
) -> dict[str, Any] | None:
    runs = [[spot for run in group.runs if (spot := _spot(cost(run), 1, run.compact_top1))] for group in groups]
    if not any(runs):
        return None
    every = (run for group in groups for run in group.runs)
    dense = sorted({spot for run in every if (spot := _spot(cost(run), 0, run.dense_top1))})
    drawings = [_drawing(canvas, scale, runs, dense) for canvas in CANVASES]
    return {"name": name, "unit": unit, "text": text, "drawings": drawings}


def _spot(costs: tuple[float, float] | None, which: int, top1: float | None) -> Spot | None:
    return None if costs is None or top1 is None else Spot(costs[which], top1)


def _drawing(canvas: Canvas, unit: float, runs: Sequence[Sequence[Spot]], dense: Sequence[Spot]) -> dict[str, Any]:
    everything = [*(spot for spots in runs for spot in spots), *dense]
    low, high = limits([spot.top1 for spot in everything], pad=0.12)
    high, most = min(high, 100.0), max(spot.cost for spot in everything) * 1.04
    x = Scale(0.0, most / unit, 46, canvas.width - 14, ticks=ticks(0.0, most / unit, 4 if canvas.narrow else 8))
    y = Scale(low, high, 400, 28, ticks=ticks(low, high, 6))

    def place(cost: float, top1: float) -> tuple[float, float]:
        return x(cost / unit), y(top1)

    groups: list[dict[str, Any]] = []
    for index, spots in enumerate(runs):
        if spots:
            cost, top1 = spread(spot.cost for spot in spots), spread(spot.top1 for spot in spots)
            mean = Spot(cost.mean or 0.0, top1.mean or 0.0)
            aside, up = cost.deviation or 0.0, top1.deviation or 0.0
            groups.append(
                {
                    "index": index,
                    "mean": mean,
                    "at": place(*mean),
                    "points": [place(*spot) for spot in spots] if len(spots) > 1 else [],
                    "ends": (*place(mean.cost - aside, mean.top1 - up), *place(mean.cost + aside, mean.top1 + up)),
                }
            )
    best = front([group["mean"] for group in groups])
    return {
        "canvas": canvas,
        "x": x,
        "y": y,
        "front": line_path(place(*spot) for spot in best) if len(best) > 1 else "",
        "dense": [(*place(*spot), spot) for spot in dense],
        "groups": groups,
    }
