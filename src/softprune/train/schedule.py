"""How a setting changes over the steps: the learning rate, and the strength of the sparsity loss."""

import math
from dataclasses import dataclass
from typing import Literal

from softprune.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A value for each step: a pure function, so a resumed run needs nothing but the step's number.

    >>> rate = Schedule(base=0.1, kind="step", milestones=(800, 1210), factor=0.1)
    >>> [round(rate(step), 4) for step in (0, 799, 800, 1210)]
    [0.1, 0.1, 0.01, 0.001]
    """

    base: float
    """The value before anything changes it."""
    kind: Literal["constant", "step", "cosine"] = "constant"
    """No change; drops at the milestones; or half a cosine from base to ``final * base``."""
    milestones: tuple[int, ...] = ()
    """Steps from which on the value is multiplied by ``factor`` once more (``step``)."""
    factor: float = 0.1
    """What a milestone multiplies by (``step``)."""
    total_steps: int = 0
    """Where the cosine ends (``cosine``)."""
    final: float = 0.0
    """Where the cosine ends, as a share of base (``cosine``)."""
    warmup_steps: int = 0
    """Steps over which the value first rises in equal parts; the last of them has the full value."""

    def __post_init__(self) -> None:
        if self.kind not in ("constant", "step", "cosine"):
            raise ConfigError(f"A schedule is constant, step or cosine. Got {self.kind!r}.")
        if self.kind == "cosine" and self.total_steps <= self.warmup_steps:
            raise ConfigError(
                "A cosine schedule must end after its warm-up. "
                f"Got total_steps = {self.total_steps} and warmup_steps = {self.warmup_steps}."
            )

    def __call__(self, step: int) -> float:
        """The value in effect in the step with this zero-based number."""
        if step < self.warmup_steps:
            return self.base * (step + 1) / self.warmup_steps
        if self.kind == "step":
            return self.base * self.factor ** sum(step >= milestone for milestone in self.milestones)
        if self.kind == "cosine":
            done = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
            share = (1 + math.cos(math.pi * done)) / 2
            return self.base * (self.final + (1 - self.final) * share)
        return self.base
