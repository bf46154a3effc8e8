"""The section [search] of a sweep file: settings with ranges instead of lists.

The values are a low-discrepancy sequence, a function of the seed and the trial's number alone. All trials are therefore
known and checked before the first one starts, and a search resumes, fails and runs on Ray like any sweep.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any

from annotated_types import Ge, Le

from softprune.errors import ConfigError, check_choice, show
from softprune.lab.config.schema import Count, FromList, PositiveCount, Section

_LARGEST = 1e100
"""Of the bounds of a range. Widths and quotients of much larger ones overflow."""
Bound = Annotated[int | float, Ge(-_LARGEST), Le(_LARGEST)]


class _Range(Section):
    """The values of one setting: between two bounds, or from a list."""

    low: Bound = 0
    high: Bound = 0
    log: bool = False
    choices: Annotated[tuple[Any, ...], FromList] = ()

    def value(self, share: float) -> Any:
        """Return the value at ``share`` of the range, in [0, 1)."""
        if self.choices:
            return self.choices[int(share * len(self.choices))]
        whole = isinstance(self.low, int) and isinstance(self.high, int)
        if self.log:
            value = self.low * (self.high / self.low) ** share
        elif whole:
            value = math.floor(self.low + share * (self.high - self.low + 1))
        else:
            value = self.low + (self.high - self.low) * share
        return round(value) if whole else float(f"{value:.4g}")  # values are part of the runs' names


class Search(Section, section="search"):
    """The section [search] of a sweep file."""

    trials: Annotated[int, Ge(1), Le(5000)]
    """Runs for every [[run]] and point of its grid."""
    space: dict[str, _Range]
    """Settings with their ranges."""
    seed: Count = 0
    """Where the sequence of values begins."""
    first_epoch: PositiveCount = 1
    """Epoch after which trials are first compared; then after `factor` times as many, and so on."""
    factor: Count = 3
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
    if not isinstance(values, Mapping):
        raise ConfigError(f"[search] must be a section. Got search = {show(values)}.")
    for key in values:
        check_choice("A key of [search]", key, Search.model_fields)
    for key in ("trials", "space"):
        if key not in values:
            raise ConfigError(f"[search] must have trials and space. Got no {key}; add it (docs/sweeps.md).")
    space = values["space"]
    if not isinstance(space, Mapping) or not space:
        raise ConfigError(f"[search.space] must give at least one setting a range. Got {show(space)}.")
    search = Search(**{**values, "space": {key: _checked_range(key, each) for key, each in space.items()}})
    if search.factor == 1:
        raise ConfigError("search.factor must be 2 or more, or 0 for no early stopping. Got 1.")
    return search


def _checked_range(key: str, values: Any) -> _Range:
    if not isinstance(values, Mapping):
        raise ConfigError(
            "A range of [search.space] must be { low = ..., high = ... } or { choices = [...] }. "
            f"Got {key} = {show(values)}."
        )
    for name in values:
        check_choice(f"A key of the range of {key}", name, _Range.model_fields)
    if {"low", "high", "choices"} & values.keys() not in ({"low", "high"}, {"choices"}):
        raise ConfigError(
            f"A range of [search.space] must have low and high, or choices. Got {key} with "
            f"{', '.join(sorted(values)) or 'nothing'}."
        )
    try:
        checked = _Range(**values)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None
    if "choices" in values:
        if not checked.choices or checked.log:
            raise ConfigError(f"{key}: choices must be a list of at least one value, without log. Got {show(values)}.")
    elif not checked.low < checked.high:
        raise ConfigError(f"{key}: low must be below high. Got {checked.low} and {checked.high}.")
    elif checked.log and checked.low < 1 / _LARGEST:
        raise ConfigError(
            f"{key}: a logarithmic range must begin at {1 / _LARGEST:g} or above. Got low = {checked.low}; raise it."
        )
    return checked
