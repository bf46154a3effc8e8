"""Where the MACs went: the network's cost as one bar flowing into a shorter one, and every module by size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from softprune.report.figures import Canvas, bar, cell, figure, fold, section, svg, table, twice
from softprune.report.formats import count, cut, percent, short
from softprune.report.markup import Markup, el, num
from softprune.report.naming import stages
from softprune.report.sections.widths import key
from softprune.report.signs import MINUS
from softprune.runs.records import Module, Run

#: Modules listed openly; the rest is folded away.
LARGEST = 14
#: Above this many modules the flow shows stages instead.
SEGMENTS = 24


@dataclass(frozen=True)
class Segment:
    name: str
    before: float
    after: float


def macs(run: Run) -> Markup | None:
    modules = [module for module in run.modules if module.macs_dense > 0]
    if not modules:
        return None
    before = sum(module.macs_dense for module in modules)
    after = sum(module.macs_compact for module in modules)
    segments = _segments(modules)
    saved = max(segments, key=lambda segment: segment.before - segment.after)
    lead = f"{short(before)} multiply-accumulates a forward became {short(after)}."
    if before > after:
        share = 100 * (saved.before - saved.after) / (before - after)
        lead += f" The largest part of what is gone, {percent(share, 0)}, was in {saved.name}."
    largest_first = sorted(modules, key=lambda module: -module.macs_dense)
    many = len(modules) > LARGEST + 4
    shown = largest_first[:LARGEST] if many else largest_first
    note = f"The {LARGEST} largest of {len(modules)} modules." if many else None
    return section(
        "macs",
        "Where the MACs went",
        lead,
        figure(
            "macs",
            twice(lambda canvas: _flow(canvas, segments, before, after)),
            key(),
            _rows(shown, before),
            caption=note,
        ),
        fold(f"All {len(modules)} modules", _rows(largest_first, before)) if many else None,
    )


def _segments(modules: Sequence[Module]) -> list[Segment]:
    if len(modules) <= SEGMENTS:
        return [Segment(module.name, module.macs_dense, module.macs_compact) for module in modules]
    segments, start = [], 0
    for name, members in stages([module.name for module in modules]):
        part = modules[start : start + members]
        start += members
        segments.append(Segment(name, sum(m.macs_dense for m in part), sum(m.macs_compact for m in part)))
    return segments


def _flow(canvas: Canvas, segments: Sequence[Segment], before: float, after: float) -> Markup:
    """Two bars to one scale; a ribbon leads each part of the dense network to what is left of it."""
    left, right = 0, canvas.width
    scale = (right - left) / max(before, after)
    top, middle, bottom, thick = 22, 50, 104, 28
    parts: list[Markup] = []
    x, y = float(left), float(left)
    for position, segment in enumerate(segments):
        width, narrow = segment.before * scale, segment.after * scale
        tone = "even" if position % 2 == 0 else "odd"
        gap = 0.7 if width > 4 else 0.0
        note = el(
            "title",
            f"{segment.name}: {count(segment.before)} MACs, {count(segment.after)} left "
            f"({percent(100 - (cut(segment.before, segment.after) or 0.0))})",
        )
        ribbon = f"M{num(x)} {middle}H{num(x + width)}L{num(y + narrow)} {bottom}H{num(y)}z"
        parts.append(
            el(
                "g",
                note,
                el("path", d=ribbon, class_="ribbon"),
                el("rect", x=x, y=top, width=max(width - gap, 0.3), height=thick, class_="from"),
                el(
                    "rect",
                    x=y,
                    y=bottom,
                    width=max(narrow - min(gap, narrow / 2), 0.0),
                    height=thick,
                    class_="to",
                ),
                class_=f"segment {tone}",
            )
        )
        label = segment.name.rsplit(".", 1)[-1] if 6.6 * len(segment.name) + 8 > width else segment.name
        if 6.6 * len(label) + 8 < width:
            parts.append(el("text", label, x=x + width / 2, y=top + 18.5, class_="on-bar middle"))
        x, y = x + width, y + narrow
    share = f"{percent(100 * after / before)} left" if before else ""
    beside = canvas.width - y > 190
    return svg(
        f"chart {canvas.name}",
        canvas.width,
        bottom + thick + (4 if beside else 20),
        "MACs of the dense and of the compact network, module by module",
        f"{short(before)} before, {short(after)} after",
        el("text", "dense ", el("tspan", short(before), class_="strong"), x=left, y=top - 8, class_="label"),
        *parts,
        el(
            "text",
            "compact ",
            el("tspan", short(after), class_="strong"),
            f", {share}",
            x=y + 9 if beside else left,
            y=bottom + (18.5 if beside else thick + 15),
            class_="label",
        ),
    )


def _rows(modules: Sequence[Module], total: float) -> Markup:
    largest = max(max(module.macs_dense, module.macs_compact) for module in modules)
    rows = []
    for module in modules:
        removed = cut(module.macs_dense, module.macs_compact)
        rows.append(
            el(
                "tr",
                el("th", module.name, el("small", module.kind), scope="row"),
                el("td", bar(module.macs_dense, module.macs_compact, largest), class_="wide-cell"),
                cell(short(module.macs_dense), module.macs_dense),
                cell(short(module.macs_compact), module.macs_compact),
                cell(f"{MINUS if removed and removed > 0 else ''}{percent(removed, 0)}", removed),
                cell(percent(100 * module.macs_dense / total), module.macs_dense / total, "n spare"),
            )
        )
    numbers = [("Dense", "n"), ("Compact", "n"), ("Removed", "n"), ("Of all", "n spare")]
    head = [("Module", ""), ("", "wide-cell"), *numbers]
    return table(head, rows, "MACs per module, largest first", "sortable bars")
