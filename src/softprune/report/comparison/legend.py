"""Colour and dash of a group, the same in every figure of a comparison, and the legend that names them."""

from __future__ import annotations

from collections.abc import Sequence

from softprune.report.figures import line_path
from softprune.report.grouping import Group
from softprune.report.markup import Markup, el

HUES = 7


def style_of(index: int) -> str:
    """Seven hues; from the eighth group on they come again, dashed."""
    return f"g{index % HUES} dash{index // HUES}" if index >= HUES else f"g{index % HUES}"


def group_legend(
    groups: Sequence[Group], class_: str = "", switches: bool = False, members: Sequence[int] | None = None
) -> Markup:
    """With ``switches``, the script turns each entry into a button that shows or hides its group. ``members``: those
    that the figure shows, where it does not show all."""
    items = []
    for index in range(len(groups)) if members is None else members:
        group = groups[index]
        stroke = el(
            "svg", line_path([(1, 6), (21, 6)], style_of(index)), viewBox="0 0 22 12", aria_hidden="true"
        )
        runs = f", {len(group.runs)} seeds" if len(group.runs) > 1 else ""
        items.append(el("li", stroke, f"{group.label}{runs}", data_group=str(index) if switches else None))
    return el("ul", *items, class_=f"legend {class_}".strip())
