"""Widths per site side by side, for experiments on the same network: where do the methods cut?"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from softprune.report.comparison.legend import group_legend, style_of
from softprune.report.figures import Canvas, cell, figure, fold, line_path, section, svg, table, twice, y_axis
from softprune.report.grouping import Group
from softprune.report.markup import Markup, el, num
from softprune.report.naming import known_as, stages
from softprune.report.scales import Scale

#: Above this many sites the rows are folded away under a profile of all of them.
ROWS_SHOWN = 32


def profiles(groups: Sequence[Group]) -> Markup | None:
    """One figure for each network that at least two experiments share."""
    networks: dict[tuple[str, tuple[tuple[str, int], ...]], list[int]] = {}
    for index, group in enumerate(groups):
        sites = tuple((site.name, site.width) for site in group.runs[0].sites)
        if sites:
            networks.setdefault((group.runs[0].model, sites), []).append(index)
    shared = [(model, sites, members) for (model, sites), members in networks.items() if len(members) > 1]
    if not shared:
        return None
    return section(
        "profiles",
        "Where they cut",
        "The share of each layer's channels that an experiment keeps, mean over its runs; layers in the "
        "order of the network.",
        *(part for model, sites, members in shared for part in _network(model, sites, groups, members)),
    )


def _network(
    model: str, sites: Sequence[tuple[str, int]], groups: Sequence[Group], members: Sequence[int]
) -> list[Markup]:
    kept = {index: _mean_kept(groups[index], sites) for index in members}
    rows = _rows(sites, groups, kept)
    deep = len(sites) > ROWS_SHOWN
    chart = twice(lambda canvas: _profile(canvas, sites, kept)) if deep else rows
    parts = [el("h3", known_as(model)), group_legend(groups, members=members), chart]
    identifier = "profile-" + "-".join(map(str, members))
    return [figure(identifier, *parts)] + (
        [fold(f"All {len(sites)} layers, one row each", rows)] if deep else []
    )


def _mean_kept(group: Group, sites: Sequence[tuple[str, int]]) -> list[float]:
    """Runs of a group whose sites differ from the first one's (an option changed the net) are left out."""
    same = [run for run in group.runs if [(site.name, site.width) for site in run.sites] == list(sites)]
    return [fmean(run.sites[position].kept for run in same) for position in range(len(sites))]


def _rows(sites: Sequence[tuple[str, int]], groups: Sequence[Group], kept: dict[int, list[float]]) -> Markup:
    columns = ((groups[index].label, "n spare") for index in kept)
    head = [("Layer", ""), ("0 to 100 % kept", "wide-cell"), ("Width", "n"), *columns]
    rows = []
    for position, (name, width) in enumerate(sites):
        dots = [_dot(index, groups[index].label, values[position], width) for index, values in kept.items()]
        strip = el(
            "svg", el("line", x1="1%", x2="99%", y1=8, y2=8, class_="base"), *dots, class_="bar dot-bar"
        )
        cells = [cell(f"{values[position]:.0f}", values[position], "n spare") for values in kept.values()]
        label = el("th", name, scope="row", data_value=str(position))
        rows.append(el("tr", label, el("td", strip, class_="wide-cell"), cell(width, width), *cells))
    return table(head, rows, "Channels kept per layer and experiment", "sortable bars wrap")


def _dot(index: int, label: str, kept: float, width: int) -> Markup:
    note = el("title", f"{label}: {kept:.0f} of {width}")
    # The strip's ends are a percent inside, so that dots at 0 and 100 are whole.
    return el(
        "circle", note, cx=f"{num(1 + 98 * kept / width, 2)}%", cy=8, r=5, class_=f"mean {style_of(index)}"
    )


def _profile(canvas: Canvas, sites: Sequence[tuple[str, int]], kept: dict[int, list[float]]) -> Markup:
    left, right, top, bottom = 38.0, canvas.width - 6.0, 22.0, 242.0
    scale_x, scale_y = Scale(0, len(sites), left, right), Scale(0, 100, bottom, top)
    lines = []
    for index, values in kept.items():
        points = [
            (scale_x(position + 0.5), scale_y(100 * value / sites[position][1]))
            for position, value in enumerate(values)
        ]
        lines.append(line_path(points, f"{style_of(index)} fine"))
    marks, x = [], left
    for name, members in stages([name for name, _ in sites]):
        end = x + members * (right - left) / len(sites)
        marks.append(el("line", x1=x + 1, x2=end - 1, y1=bottom + 9, y2=bottom + 9, class_="band"))
        if name and end - x > 6.5 * len(name):
            marks.append(el("text", name, x=(x + end) / 2, y=bottom + 24, class_="tick middle"))
        x = end
    return svg(
        f"chart {canvas.name}",
        canvas.width,
        bottom + 32,
        "Share of channels kept, layer by layer",
        f"{len(kept)} experiments, {len(sites)} layers",
        y_axis(scale_y, [0, 25, 50, 75, 100], left, right),
        el("text", "kept, %", x=left, y=top - 10, class_="axis"),
        *lines,
        *marks,
    )
