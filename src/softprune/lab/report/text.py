"""Format numbers and names for pages and the terminal. Unknown values (None) become a dash."""

import re

UNKNOWN = "-"
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_FAMILIES = {"vgg": "VGG", "resnet": "ResNet", "densenet": "DenseNet", "cifar": "CIFAR"}


def count(value: float | None) -> str:
    """Format ``313201664`` as ``313,201,664``."""
    return UNKNOWN if value is None else f"{value:,.0f}"


def short(value: float | None) -> str:
    """Format ``313201664`` as ``313 M``: three significant digits and an SI prefix."""
    if value is None:
        return UNKNOWN
    for size, prefix in _PREFIXES:
        if abs(value) >= size:
            scaled = value / size
            digits = 2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0
            return f"{scaled:.{digits}f} {prefix}"
    return f"{value:,.0f}"


def file_size(value: float | None) -> str:
    """Format a number of bytes in decimal units (kB, MB)."""
    return UNKNOWN if value is None else f"{short(value)}B"


def milliseconds(value: float | None) -> str:
    """Format a latency in milliseconds with three significant digits."""
    return UNKNOWN if value is None else f"{value:.3g} ms"


def cut(before: float | None, after: float | None) -> float | None:
    """Return the removed share in percent; None if a count is unknown or ``before`` is not positive."""
    return None if before is None or after is None or before <= 0 else 100.0 * (1.0 - after / before)


def fixed(value: float | None, digits: int = 2) -> str:
    """Format a number with ``digits`` decimals, without a negative zero."""
    return UNKNOWN if value is None else f"{round(value, digits) + 0.0:.{digits}f}"


def percent(value: float | None, digits: int = 1) -> str:
    """Format a percentage with a percent sign."""
    return UNKNOWN if value is None else f"{fixed(value, digits)}%"


def known_as(key: str) -> str:
    """Return the name of a network or data set as in papers: ``resnet164`` becomes ResNet-164. Others are unchanged."""
    match = re.fullmatch(rf"({'|'.join(_FAMILIES)})_?(\d+)", key)
    return f"{_FAMILIES[match[1]]}-{match[2]}" if match else key
