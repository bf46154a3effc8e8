"""One bell curve, drawn once and placed many times: every N(beta, gamma^2) is an affine copy of it."""

from __future__ import annotations

import math

from softprune.report.markup import Markup, el, num

REACH = 3.3
POINTS = 44


def bell_defs(identifier: str, left: float, right: float, split: float, top: float, bottom: float) -> Markup:
    """The unit bell, the plot's frame, and the part of it right of ``split``, for ``bell`` to refer to."""
    steps = [REACH * (2 * index / POINTS - 1) for index in range(POINTS + 1)]
    outline = "L".join(f"{num(x, 2)} {num(-math.exp(-0.5 * x * x), 3)}" for x in steps)
    split = min(max(split, left), right)
    return el(
        "defs",
        el("path", id=f"{identifier}-bell", class_="bell", d=f"M{outline}z"),
        _clip(f"{identifier}-frame", left, top, right - left, bottom - top),
        _clip(f"{identifier}-live", split, top, right - split, bottom - top),
    )


def bell(
    identifier: str, centre: float, spread: float, base: float, height: float, style: str, note: str
) -> Markup:
    """The curve with its foot on ``base``: outlined whole, filled where the activation lets it through."""
    # A scale of zero has no width to draw; half a pixel still shows where it stands.
    place = f"matrix({num(max(spread, 0.5), 2)} 0 0 {num(height)} {num(centre)} {num(base)})"
    return el(
        "g",
        el("title", note) if note else None,
        el("use", href=f"#{identifier}-bell", transform=place, class_="outline"),
        el("g", el("use", href=f"#{identifier}-bell", transform=place), clip_path=f"url(#{identifier}-live)"),
        class_=style,
    )


def _clip(identifier: str, x: float, y: float, width: float, height: float) -> Markup:
    return el("clipPath", el("rect", x=x, y=y, width=max(width, 0.0), height=height), id=identifier)
