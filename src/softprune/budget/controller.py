"""The strength during training: moved so that the target's own edge channel dies when half of the steps are done.

What is controlled is not the cost itself, which stands still for long and then falls in steps, but the margin of
the channel at the target's edge: how far the log-odds of its being alive lie above the threshold at which SCP drops
a channel. The margin moves smoothly from the first step on, and the target is met when it is zero.
"""

from __future__ import annotations

import math
from typing import Any

REACH = 0.5
"""The share of the training after which the margin should be zero: the paper's networks are sparse by then, and
learning rates usually fall afterwards."""
_INTEGRAL = 20.0
_PROPORTIONAL = 5.0
_FASTEST = math.log(2.0)
"""The strength at most doubles or halves from one look to the next ..."""
_LAG = 5
"""... or within so many steps, where looks are closer: momentum lets nothing show sooner."""
_RANGE = math.log(1000.0)
"""How far the strength may move from where it began."""
_CEILING = math.log(0.02)
"""Where the sparsity loss outweighs what the task has to say about a channel, and all of them die alike."""


def first_strength(total_steps: int) -> float:
    """Where to begin: a strength that would silence an untrained channel, which learns nothing, about in time.

    With a learning rate of 0.1 and momentum 0.9, a step moves `beta + 1.64 |gamma|` of an idle channel by 4.3 times
    the strength, from 1.6 down to 0.05.
    """
    return min(max(1.0 / total_steps, 1e-6), 1e-2)


class Controller:
    """A proportional-integral rule on the logarithm of the strength."""

    def __init__(self, total_steps: int) -> None:
        self.total_steps = total_steps
        self._start = math.log(first_strength(total_steps))
        self.level = self._start
        self._first: float | None = None
        self._last: tuple[float, float] | None = None

    @property
    def strength(self) -> float:
        """The strength in force."""
        return math.exp(self.level)

    def update(self, step: int, margin: float) -> float:
        """Look at the margin when `step` steps are done; returns the new strength."""
        done = step / self.total_steps
        if self._first is None:
            self._first = margin
        error = margin - self._first * max(0.0, 1 - done / REACH)
        if self._last is not None:
            then, before = self._last
            change = _INTEGRAL * error * (done - then) + _PROPORTIONAL * (error - before)
            fastest = _FASTEST * min(1.0, (done - then) * self.total_steps / _LAG)
            self.level += min(max(change, -fastest), fastest)
            self.level = min(max(self.level, self._start - _RANGE), self._start + _RANGE, _CEILING)
        self._last = (done, error)
        return self.strength

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {"level": self.level, "first": self._first, "last": self._last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self.level, self._first = float(state["level"]), state["first"]
        self._last = None if state["last"] is None else (float(state["last"][0]), float(state["last"][1]))
