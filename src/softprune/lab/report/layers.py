"""Layer by layer: widths before and after, where the MACs went, and the profiles of several experiments."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from softprune.lab.report.scales import Canvas, Scale, line_path, num, ticks
from softprune.lab.report.text import cut, stages
from softprune.lab.runs.result import Module, SiteRecord

ROWS_SHOWN = 32
"""With more sites the rows are folded away under a chart of all of them."""
SEGMENTS = 24
"""With more modules the flow shows stages."""


def skyline(canvas: Canvas, sites: Sequence[SiteRecord]) -> dict[str, Any]:
    """A column per layer: its width and kept channels above, the kept share below. For the template "skyline"."""
    left, right, bottom, foot = 38, canvas.width - 6, 178, 276
    largest = max(site.width for site in sites)
    widths = Scale(0, largest, bottom, 18, ticks=ticks(0, largest, 4))
    shares = Scale(0, 100, foot, bottom + 34, ticks=(0, 50, 100))
    pitch = (right - left) / len(sites)
    thickness = max(pitch - (1.0 if pitch > 3 else 0.35), 0.6)
    was, now = [], []
    for position, site in enumerate(sites):
        x = left + position * pitch
        was += [_column(x, thickness, widths(site.width), bottom), _column(x, thickness, shares(100), foot)]
        now.append(_column(x, thickness, widths(site.kept), bottom))
        now.append(_column(x, thickness, shares(100 * site.kept / site.width), foot))
    return {
        "canvas": canvas,
        "left": left,
        "right": right,
        "pitch": pitch,
        "widths": widths,
        "shares": shares,
        "was": "".join(was),
        "now": "".join(now),
        "emptied": [left + (position + 0.5) * pitch for position, site in enumerate(sites) if site.kept == 0],
        "bands": bands([site.name for site in sites], left, pitch),
    }


def _column(x: float, width: float, top: float, bottom: float) -> str:
    return f"M{num(x, 2)} {num(bottom)}V{num(top)}h{num(width, 2)}V{num(bottom)}z" if top < bottom else ""


def bands(names: Sequence[str], left: float, pitch: float) -> list[tuple[float, float, str]]:
    """(start, end, name) of the stages under the columns; the name is empty where it has no room."""
    found, x = [], float(left)
    for name, members in stages(names):
        end = x + members * pitch
        found.append((x, end, name if end - x > 6.5 * len(name) else ""))
        x = end
    return found


def segments(modules: Sequence[Module]) -> list[dict[str, Any]]:
    """The modules, or the stages of a deep network, with their MACs before and after."""
    names = [module.name for module in modules]
    rest, found = iter(modules), []
    for name, members in stages(names) if len(modules) > SEGMENTS else [(name, 1) for name in names]:
        part = list(islice(rest, members))
        before, after = sum(m.macs_dense for m in part), sum(m.macs_compact for m in part)
        found.append({"name": name, "before": before, "after": after})
    return found


def flow(canvas: Canvas, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Two bars to one scale, with a ribbon from each part to what is left of it. For the template "flow"."""
    before, after = sum(part["before"] for part in parts), sum(part["after"] for part in parts)
    scale = canvas.width / max(before, after)
    x, y, drawn = 0.0, 0.0, []
    for part in parts:
        width, narrow, name = part["before"] * scale, part["after"] * scale, part["name"]
        gap = 0.7 if width > 4 else 0.0
        label = name.rsplit(".", 1)[-1] if 6.6 * len(name) + 8 > width else name
        drawn.append(
            {
                **part,
                "left": 100 - (cut(part["before"], part["after"]) or 0.0),
                "ribbon": f"M{num(x)} 50H{num(x + width)}L{num(y + narrow)} 104H{num(y)}z",
                "from": (x, max(width - gap, 0.3)),
                "to": (y, max(narrow - min(gap, narrow / 2), 0.0)),
                "label": label if 6.6 * len(label) + 8 < width else "",
                "middle": x + width / 2,
            }
        )
        x, y = x + width, y + narrow
    return {
        "canvas": canvas,
        "parts": drawn,
        "before": before,
        "after": after,
        "end": y,
        "beside": canvas.width - y > 190,
    }


def profile(canvas: Canvas, sites: Sequence[tuple[str, int]], kept: Mapping[int, Sequence[float]]) -> dict[str, Any]:
    """The kept share of each layer, a line per experiment. For the template "profile"."""
    scale_x = Scale(0, len(sites), 38.0, canvas.width - 6.0)
    scale_y = Scale(0, 100, 242.0, 22.0, ticks=(0, 25, 50, 75, 100))
    lines = {
        index: line_path(
            (scale_x(position + 0.5), scale_y(100 * value / width))
            for position, (value, (_, width)) in enumerate(zip(values, sites, strict=True))
        )
        for index, values in kept.items()
    }
    pitch = (scale_x.end - scale_x.start) / len(sites)
    places = bands([name for name, _ in sites], scale_x.start, pitch)
    return {"canvas": canvas, "x": scale_x, "y": scale_y, "lines": lines, "bands": places}
