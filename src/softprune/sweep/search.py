"""The section [search] of a sweep file: settings with ranges instead of lists.

The values are a low-discrepancy sequence, a function of the seed and the trial's number alone. All trials are therefore
known and checked before the first one starts, and a search resumes, fails and runs on Ray like any sweep.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any

from annotated_types import Ge, Le
from pydantic import BaseModel, ConfigDict, ValidationError

from softprune.errors import ConfigError


class _Range(BaseModel):
    """The values of one setting: between two bounds, or from a list."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    low: int | float | None = None
    high: int | float | None = None
    log: bool = False
    choices: tuple[Any, ...] | list[Any] = ()

    def value(self, share: float) -> Any:
        """Return the value at ``share`` of the range, in [0, 1)."""
        if self.choices:
            return self.choices[int(share * len(self.choices))]
        assert self.low is not None
        assert self.high is not None
        if isinstance(self.low, int) and isinstance(self.high, int) and not self.log:
            return self.low + int(share * (self.high - self.low + 1))
        if self.log:
            value = self.low * (self.high / self.low) ** share
        else:
            value = self.low + (self.high - self.low) * share
        return float(f"{value:.4g}")  # values are part of the runs' names


class Search(BaseModel):
    """The section [search] of a sweep file."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    trials: Annotated[int, Ge(1), Le(5000)]
    """Runs for every [[run]] and point of its grid."""
    space: dict[str, _Range]
    """Settings with their ranges."""
    seed: Annotated[int, Ge(0)] = 0
    """Where the sequence of values begins."""
    first_epoch: Annotated[int, Ge(1)] = 1
    """Epoch after which trials are first compared; then after `factor` times as many, and so on."""
    factor: Annotated[int, Ge(0)] = 3
    """The best 1 / `factor` of the trials continue; 0 lets all of them finish."""

    def points(self) -> list[dict[str, Any]]:
        """Return the values of every trial, in Roberts' R sequence: evenly spread for any number of trials."""
        count = len(self.space)
        # The positive root of x^(d + 1) = x + 1.
        root = 2.0
        for _ in range(60):
            root = (1 + root) ** (1 / (count + 1))
        steps = [root ** -(axis + 1) for axis in range(count)]
        first = 1 + self.seed * self.trials
        return [
            {
                key: values.value((0.5 + number * step) % 1.0)
                for (key, values), step in zip(self.space.items(), steps, strict=True)
            }
            for number in range(first, first + self.trials)
        ]

    def rungs(self, epochs: int) -> list[int]:
        """Return the epochs, counted from one, after which the trials of a run of ``epochs`` epochs are compared."""
        if self.factor < 2:
            return []
        count = max(0, math.ceil(math.log(epochs / self.first_epoch, self.factor) - 1e-9)) if epochs else 0
        return [self.first_epoch * self.factor**power for power in range(count)]


def read_search(values: Any) -> Search | None:
    """Return the checked section, or None if the file has none."""
    if values is None:
        return None
    try:
        search = Search(**values) if isinstance(values, Mapping) else Search.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(["search", *map(str, first["loc"])])
        raise ConfigError(
            f"[search] has trials, space, seed, first_epoch and factor. Got {place}: {first['msg']}."
        ) from None
    if search.factor == 1:
        raise ConfigError("search.factor must be 2 or more, or 0 for no early stopping. Got 1.")
    if not search.space:
        raise ConfigError("[search.space] must give at least one setting a range. Got none.")
    for key, each in search.space.items():
        bounds = (each.low, each.high)
        if bool(each.choices) == (None not in bounds) or (each.choices and bounds != (None, None)):
            raise ConfigError(
                f"A range of [search.space] has low and high, or choices. Got {key!r} with neither or both."
            )
        if each.low is not None and each.high is not None and not each.low < each.high:
            raise ConfigError(f"{key}: low must be below high. Got {each.low} and {each.high}.")
        if each.log and not (each.low or 0) > 0:
            raise ConfigError(f"{key}: a logarithmic range must begin above 0. Got low = {each.low}.")
    return search
