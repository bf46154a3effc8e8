"""From values to pixels: scales, round ticks, paths, and places for labels.

A chart is drawn twice, for a desktop and for a phone, so that its type keeps its size. The style sheet shows one.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from softprune.lab.report.text import MINUS, scientific

WARPS: dict[str, Callable[[float], float]] = {
    "linear": lambda value: value,
    # Accuracies from 10 to 95 on one axis: the square root of the error gives the upper ones room.
    "error": lambda value: -math.sqrt(max(100.0 - value, 0.0)),
    "log": lambda value: math.log10(max(value, 1e-30)),
}
"""What an axis applies to its values; ``warps`` in page.js must agree."""


@dataclass(frozen=True)
class Canvas:
    """One of the two drawings: its class in the style sheet and its width in pixels."""

    name: str
    width: int

    @property
    def narrow(self) -> bool:
        return self.name == "narrow"


CANVASES = (Canvas("wide", 880), Canvas("narrow", 360))


@dataclass(frozen=True)
class Scale:
    """Maps [low, high] to the pixels [start, end]."""

    low: float
    high: float
    start: float
    end: float
    warp: str = "linear"
    ticks: Sequence[float] = ()

    def __call__(self, value: float) -> float:
        warp = WARPS[self.warp]
        low, high = warp(self.low), warp(self.high)
        share = (warp(value) - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)

    def clamp(self, value: float) -> float:
        """The pixel of `value`, moved to the nearer end where it lies outside."""
        return self(min(max(value, self.low), self.high))

    @property
    def marks(self) -> list[tuple[float, str]]:
        """(pixel, label) of the ticks."""
        return [(self(tick), tick_label(tick, [tick] if self.warp == "log" else self.ticks)) for tick in self.ticks]


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """About `wanted` round values in [low, high]."""
    if not high > low:
        return [low]
    rough = (high - low) / max(wanted, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def tick_label(value: float, values: Sequence[float]) -> str:
    """The text of a tick, with as many decimals as the whole axis needs; tiny values with an exponent."""
    if 0 < max(map(abs, values)) < 1e-2 and value != 0:
        return scientific(value).replace("-", MINUS)
    digits = next((d for d in range(7) if all(abs(round(v, d) - v) < 1e-9 for v in values)), 6)
    return f"{value:,.{digits}f}".replace("-", MINUS)


def quantile(values: Sequence[float], share: float) -> float:
    """The `share` quantile by linear interpolation. `values` must not be empty."""
    return float(np.quantile(values, share))


def limits(values: Sequence[float], trim: float = 0.0, pad: float = 0.05) -> tuple[float, float]:
    """The range of `values` without the `trim` share at each end, padded and never empty."""
    low, high = quantile(values, trim), quantile(values, 1.0 - trim)
    room = (high - low) * pad or abs(high) * 0.1 or 1.0
    return low - room, high + room


def apart(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places for labels: near those wanted, in their order, `gap` from each other, inside [low, high]."""
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    placed, floor, ceiling = list(wanted), low, high
    for index in order:
        placed[index] = max(placed[index], floor)
        floor = placed[index] + gap
    for index in reversed(order):
        placed[index] = min(placed[index], ceiling)
        ceiling = placed[index] - gap
    return placed


def num(value: float, digits: int = 1) -> str:
    """A coordinate: at most `digits` decimals, no trailing zeros, no negative zero."""
    return f"{round(value, digits) + 0.0:.12g}"


def line_path(points: Iterable[tuple[float, float]]) -> str:
    """Return the path of a polyline. A single point is a dot."""
    texts = [f"{num(x)} {num(y)}" for x, y in points]
    return f"M{texts[0]}h0{''.join(f'L{each}' for each in texts[1:])}" if texts else ""
