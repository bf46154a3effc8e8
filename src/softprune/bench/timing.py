"""Time two or more calls in alternating blocks, so that other load on the machine affects all of them."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from softprune.hardware import Call, seconds

BLOCK_SECONDS = 0.02
"""Approximate length of a timed block. Shorter blocks measure the clock."""
MOST_CALLS = 1000


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call over several blocks."""

    blocks: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median block."""
        return statistics.median(self.blocks)

    @property
    def spread(self) -> tuple[float, float]:
        """Lower and upper quartile."""
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
    """Time every call in `repeats` blocks in turns: A B, B A, A B, ...

    Args:
        calls: The calls by name.
        repeats: Blocks per call.
        warm_up: Untimed calls of each.
        finish: Called before the clock is read, to synchronise with a GPU.
        block_seconds: Approximate length of a block.
    """
    for call in calls.values():
        for _ in range(warm_up):
            call()
    # The same number of calls per block for all, so that a fixed cost per block has the same weight.
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
    """Return median, lower and upper quartile of the ratio slow / fast of neighbouring blocks."""
    ratios = Timing(tuple(a / b for a, b in zip(slow.blocks, fast.blocks, strict=True)))
    return ratios.median, *ratios.spread
