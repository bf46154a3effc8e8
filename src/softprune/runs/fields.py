"""Values out of JSON that others wrote: each has a type, and an error names the file and the place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from softprune.errors import FileFormatError


@dataclass(frozen=True)
class Fields:
    """One JSON object and where it stands. Absent and null are the same: ``None``, or the empty value."""

    values: Mapping[str, Any]
    place: str

    def number(self, key: str) -> float | None:
        """A finite number. NaN and infinities read as unknown: a diverged loss is no value to plot."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number or null", value)
        return value if math.isfinite(value) else None

    def text(self, key: str, default: str = "") -> str:
        value = self.values.get(key)
        return default if value is None else str(value)

    def child(self, key: str) -> Fields | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self._wrong(key, "an object or null", value)
        return Fields(value, f"{self.place}, {key}")

    def children(self, key: str) -> list[Fields]:
        rows = self._list(key)
        for index, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise self._wrong(f"{key}[{index}]", "an object", row)
        return [Fields(row, f"{self.place}, {key}[{index}]") for index, row in enumerate(rows)]

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of numbers; one that is not finite is kept as NaN, so that positions stay."""
        rows = self._list(key)
        for index, row in enumerate(rows):
            if row is not None and (isinstance(row, bool) or not isinstance(row, int | float)):
                raise self._wrong(f"{key}[{index}]", "a number", row)
        return tuple(math.nan if row is None else float(row) for row in rows)

    def flags(self, key: str) -> tuple[bool, ...]:
        rows = self._list(key)
        for index, row in enumerate(rows):
            if row not in (0, 1):
                raise self._wrong(f"{key}[{index}]", "true or false", row)
        return tuple(bool(row) for row in rows)

    def _list(self, key: str) -> list[Any]:
        value = self.values.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self._wrong(key, "a list", value)
        return value

    def _wrong(self, key: str, rule: str, value: object) -> FileFormatError:
        return FileFormatError(
            f"{self.place}: '{key}' must be {rule}. Got {str(value)[:80]!r} ({type(value).__name__}). "
            "The file was not written by this version of softprune, or was edited since."
        )
