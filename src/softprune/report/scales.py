"""From data to pixels: linear and square-root scales, round ticks, limits that one outlier cannot own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """Maps [low, high] to [start, end]; with ``root``, through the square root (for values from zero up)."""

    low: float
    high: float
    start: float
    end: float
    root: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.root:
            low, high, at = math.sqrt(low), math.sqrt(high), math.sqrt(max(value, 0.0))
        share = (at - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)

    def clamp(self, value: float) -> float:
        """The pixel of ``value``, moved to the nearer end where it lies outside."""
        return self(min(max(value, self.low), self.high))


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """About ``wanted`` round values in [low, high]."""
    if not high > low:
        return [low]
    rough = (high - low) / max(wanted, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def tick_label(value: float, values: Sequence[float]) -> str:
    """One tick's text, with as many decimals as the whole axis needs."""
    digits = next((d for d in range(7) if all(abs(round(v, d) - v) < 1e-9 for v in values)), 6)
    return f"{value:,.{digits}f}".replace("-", "\N{MINUS SIGN}")


def quantile(values: Sequence[float], share: float) -> float:
    """The ``share`` quantile by linear interpolation; ``values`` must not be empty."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def limits(values: Sequence[float], trim: float = 0.0, pad: float = 0.05) -> tuple[float, float]:
    """The range to show: all of ``values`` but the ``trim`` share at each end, padded, never empty."""
    if not values:
        return 0.0, 1.0
    low, high = quantile(values, trim), quantile(values, 1.0 - trim)
    room = (high - low) * pad or abs(high) * 0.1 or 1.0
    return low - room, high + room
