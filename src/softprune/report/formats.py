"""How numbers are written for a reader: a few significant digits, a unit, and a dash where none is known."""

from __future__ import annotations

from softprune.report.signs import MINUS, THIN, UNKNOWN

_SI = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def count(value: float | None) -> str:
    """``313201664`` as ``313,201,664``."""
    return UNKNOWN if value is None else f"{value:,.0f}"


def short(value: float | None) -> str:
    """``313201664`` as ``313 M``: three significant digits and a prefix."""
    if value is None:
        return UNKNOWN
    for size, unit in _SI:
        if abs(value) >= size:
            return f"{_three(value / size)}{THIN}{unit}"
    return f"{value:,.0f}"


def file_size(value: float | None) -> str:
    """Bytes in decimal units, as file managers show them."""
    if value is None:
        return UNKNOWN
    for size, unit in _BYTES:
        if value >= size:
            return f"{_three(value / size)}{THIN}{unit}"
    return f"{value:.0f}{THIN}B"


def milliseconds(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3g}{THIN}ms"


def accuracy(value: float | None) -> str:
    """A percentage as the records hold it, with the two decimals that papers give."""
    return UNKNOWN if value is None else f"{value:.2f}"


def cut(before: float | None, after: float | None) -> float | None:
    """The share removed, in percent; unknown where either count is, or where there was nothing to remove."""
    if before is None or after is None or before <= 0:
        return None
    return 100.0 * (1.0 - after / before)


def percent(value: float | None, digits: int = 1) -> str:
    return UNKNOWN if value is None else f"{_signed(value, digits)}{THIN}%"


def change(value: float | None, digits: int = 2) -> str:
    """A difference with its sign, ``+0.12`` or ``-0.12`` with a true minus."""
    if value is None:
        return UNKNOWN
    text = _signed(value, digits)
    return text if text.startswith(MINUS) or float(text) == 0 else f"+{text}"


def significant(value: float | None, digits: int = 3) -> str:
    """A number of any size, such as a learning rate or a shift."""
    return UNKNOWN if value is None else f"{value:.{digits}g}".replace("-", MINUS)


def duration(seconds: float | None) -> str:
    if seconds is None:
        return UNKNOWN
    if seconds < 60:
        return f"{seconds:.3g}{THIN}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}{THIN}h {minutes:02d}{THIN}min"
    return f"{minutes}{THIN}min {rest:02d}{THIN}s"


def _three(value: float) -> str:
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f}"


def _signed(value: float, digits: int) -> str:
    text = f"{abs(value):.{digits}f}"
    return f"{MINUS}{text}" if value < 0 and float(text) != 0 else text
