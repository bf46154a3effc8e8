"""Time two or more calls side by side: alternating blocks, so that what disturbs the machine disturbs all of them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from softprune.hardware import Call, seconds

BLOCK_SECONDS = 0.02
"""A timed block repeats its call until it takes about this long: shorter ones measure the clock."""
MOST_CALLS = 1000


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call over several blocks."""

    blocks: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.blocks)

    @property
    def spread(self) -> tuple[float, float]:
        """The quartiles: half of all blocks lie between them."""
        if len(self.blocks) < 2:
            return self.blocks[0], self.blocks[0]
        low, _, high = statistics.quantiles(self.blocks, n=4, method="inclusive")
        return low, high

    def __str__(self) -> str:
        low, high = self.spread
        return f"{self.median:.3g} ms ({low:.3g} to {high:.3g})"


def alternate(
    calls: Mapping[str, Call],
    *,
    repeats: int = 15,
    warm_up: int = 3,
    finish: Call = lambda: None,
    block_seconds: float = BLOCK_SECONDS,
) -> dict[str, Timing]:
    """Time every call in `repeats` blocks that take turns: A B, B A, A B ...

    Args:
        calls: What to time, by name.
        repeats: Blocks for each.
        warm_up: Calls of each before anything is timed.
        finish: Runs before the clock is read: waits for a GPU.
        block_seconds: About how long a block takes.
    """
    for call in calls.values():
        for _ in range(warm_up):
            call()
    # The same number of calls per block for all, so that a fixed cost per block weighs the same.
    slowest = max(seconds(call, 1, finish) for call in calls.values())
    number = min(max(int(block_seconds / max(slowest, 1e-9)), 1), MOST_CALLS)
    blocks: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for _ in range(repeats):
        for name in order:
            blocks[name].append(1000 * seconds(calls[name], number, finish) / number)
        order.reverse()
    return {name: Timing(tuple(values)) for name, values in blocks.items()}


def paired_ratio(slow: Timing, fast: Timing) -> tuple[float, float, float]:
    """(median, lower quartile, upper quartile) of slow over fast, block by block: neighbours saw the same machine."""
    ratios = Timing(tuple(a / b for a, b in _pairs(slow.blocks, fast.blocks)))
    return ratios.median, *ratios.spread


def _pairs(left: Sequence[float], right: Sequence[float]) -> list[tuple[float, float]]:
    return list(zip(left, right, strict=True))
