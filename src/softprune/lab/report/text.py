"""Numbers and names as a page writes them: few significant digits, a unit, and a dash for an unknown value."""

import re
from collections.abc import Sequence
from datetime import datetime
from itertools import groupby
from typing import Any

MINUS = "\N{MINUS SIGN}"
PLUS_MINUS = "\N{PLUS-MINUS SIGN}"
DOT = "\N{MIDDLE DOT}"
UNKNOWN = "\N{EM DASH}"
THIN = "\N{NARROW NO-BREAK SPACE}"

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_FAMILIES = {"vgg": "VGG", "resnet": "ResNet", "densenet": "DenseNet", "cifar": "CIFAR"}
MOST_STAGES = 9


def count(value: float | None) -> str:
    """``313201664`` as ``313,201,664``."""
    return UNKNOWN if value is None else f"{value:,.0f}"


def short(value: float | None) -> str:
    """``313201664`` as ``313 M``: three significant digits and a prefix."""
    return UNKNOWN if value is None else _with_unit(value, _PREFIXES) or f"{value:,.0f}"


def count_or_short(value: float | None) -> str:
    """Small counts in full, large ones with a prefix."""
    return count(value) if value is not None and value < 1e5 else short(value)


def file_size(value: float | None) -> str:
    """Bytes in decimal units."""
    return UNKNOWN if value is None else _with_unit(value, _BYTES) or f"{value:.0f}{THIN}B"


def milliseconds(value: float | None) -> str:
    """A latency, with three significant digits."""
    return UNKNOWN if value is None else f"{value:.3g}{THIN}ms"


def cut(before: float | None, after: float | None) -> float | None:
    """The removed share in percent, or None where a count is unknown or there was nothing to remove."""
    if before is None or after is None or before <= 0:
        return None
    return 100.0 * (1.0 - after / before)


def fixed(value: float | None, digits: int = 2) -> str:
    """A number with `digits` decimals and no negative zero."""
    return UNKNOWN if value is None else f"{round(value, digits) + 0.0:.{digits}f}".replace("-", MINUS)


accuracy = fixed
"""A percentage as in the records."""


def percent(value: float | None, digits: int = 1) -> str:
    """A percentage with its sign."""
    return UNKNOWN if value is None else f"{fixed(value, digits)}{THIN}%"


def removed(value: float | None, digits: int = 1) -> str:
    """A removed share as a negative change: ``-12.3 %``."""
    return f"{MINUS if value is not None and round(value, digits) > 0 else ''}{percent(value, digits)}"


def change(value: float | None) -> str:
    """A difference with its sign."""
    return f"{'+' if value is not None and round(value, 2) > 0 else ''}{fixed(value)}"


def significant(value: float | None, digits: int = 3) -> str:
    """A number of any size, such as a learning rate."""
    return UNKNOWN if value is None else f"{value:.{digits}g}".replace("-", MINUS)


def scientific(value: float) -> str:
    """``0.0001`` as ``1e-4``: a small number in up to three digits."""
    digits, exponent = f"{value:.2e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


def duration(seconds: float) -> str:
    """Seconds, or minutes and seconds, or hours and minutes."""
    if seconds < 60:
        return f"{seconds:.3g}{THIN}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}{THIN}h {minutes:02d}{THIN}min" if hours else f"{minutes}{THIN}min {rest:02d}{THIN}s"


def to_the_minute(stamp: str) -> str:
    """A time stamp without its seconds; any other text unchanged."""
    try:
        return datetime.fromisoformat(stamp).strftime("%Y-%m-%d %H:%M")
    except ValueError:
        return stamp


def known_as(key: str) -> str:
    """A network or data set as papers write it: ``resnet164`` as ResNet-164. Other names stay."""
    match = re.fullmatch(rf"({'|'.join(_FAMILIES)})_?(\d+)", key)
    return f"{_FAMILIES[match[1]]}-{match[2]}" if match else key


def stages(names: Sequence[str]) -> list[tuple[str, int]]:
    """(prefix, number of names) for runs of neighbours with a common prefix.

    The prefix is the longest with at most nine groups. A network without such a prefix is one group.
    """
    best = [("", len(names))]
    deepest = max((name.count(".") for name in names), default=0)
    for depth in range(1, deepest + 1):
        groups = groupby(names, key=lambda name: ".".join(name.split(".")[:depth]))
        found = [(key, len(list(members))) for key, members in groups]
        if len(found) > MOST_STAGES:
            break
        best = found
    return best


def setting_text(value: Any) -> str:
    """A value of the configuration as text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "not set"
    if isinstance(value, list):
        return ", ".join(setting_text(item) for item in value)
    return str(value)


def _with_unit(value: float, units: Sequence[tuple[float, str]]) -> str:
    for size, unit in units:
        if abs(value) >= size:
            scaled = value / size
            digits = 2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0
            return f"{scaled:.{digits}f}{THIN}{unit}"
    return ""
