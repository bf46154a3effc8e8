"""The strength during training: constant while the cut arrives in time, raised when it is late.

What is controlled is not the cost itself, which changes in steps, but the highest score of a channel that must be
removed: 1 for an untrained channel, 0 at the threshold at which SCP drops a channel. The target is met when the score
is 0.
"""

import math
from typing import Any

REACH = 1 / 3
"""The share of the training after which the score should be 0: features are still forming there, and learning rates
usually fall later."""
_WATCH = 0.05
"""The share of the training at its beginning in which the strength is not raised ..."""
_LAG = 20
"""... but this many steps at least: with momentum, a strength takes so long to show its full effect."""
_RAISE = 0.1
"""The largest change of the strength's logarithm in one hundredth of the training ..."""
_RAISE_LATE = 0.3
"""... and after `REACH`."""
_BRAKE = 0.1
"""How much it falls in one hundredth of the training while too many channels are about to die."""
_CROWD = 0.02
"""The share of the channels to keep that may be about to die before the strength falls."""
_CEILING = 0.02
"""Above, the sparsity loss outweighs the task loss for every channel, and all of them die alike."""
_FIRST_CEILING = 0.008
"""The largest first strength: a training of less than 150 steps must learn something before channels die."""


def first_strength(total_steps: int) -> float:
    """Return the strength of the first step.

    5e-5 is typical of runs at a fixed strength. With a learning rate of 0.1 and momentum 0.9, a step moves
    ``beta + 1.64 |gamma|`` of an idle channel by 4.3 times the strength; the second term lets it fall from 1.6 to 0.05
    in the first third of a short training.
    """
    return min(5e-5 + 1.2 / total_steps, _FIRST_CEILING)


class Controller:
    """Moves the strength between a quarter of its first value and a ceiling."""

    def __init__(self, total_steps: int) -> None:
        self.total_steps = total_steps
        self.strength = first_strength(total_steps)
        self._last: tuple[float, float] | None = None
        self._speed: float | None = None

    def update(self, step: int, score: float, endangered: float) -> float:
        """Return the strength from `step` on; `endangered` is the share of the channels to keep that would die soon."""
        done = step / self.total_steps
        if self._last is not None and done > self._last[0]:
            passed = done - self._last[0]
            speed = (self._last[1] - score) / passed
            self._speed = speed if self._speed is None else 0.5 * (self._speed + speed)
            self.strength *= math.exp(min(100 * passed, 5.0) * self._change(done, score, endangered))
            lowest = first_strength(self.total_steps) / 4
            self.strength = min(max(self.strength, lowest), _CEILING)
        self._last = (done, score)
        return self.strength

    def _change(self, done: float, score: float, endangered: float) -> float:
        """Return the change of the strength's logarithm for one hundredth of the training."""
        if endangered > _CROWD:
            return -_BRAKE
        if done < max(_WATCH, _LAG / self.total_steps) or score <= 0 or self._speed is None:
            return 0.0
        if done >= REACH:
            return _RAISE_LATE
        # How much faster the score would have to fall to be 0 in time.
        needed = score / (REACH - done)
        return _RAISE * min(max(1 - self._speed / needed, 0.0), 1.0)

    def state_dict(self) -> dict[str, Any]:
        return {"strength": self.strength, "last": self._last, "speed": self._speed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.strength, self._speed = float(state["strength"]), state["speed"]
        self._last = None if state["last"] is None else (float(state["last"][0]), float(state["last"][1]))
