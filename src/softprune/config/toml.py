"""Write TOML: the standard library reads it but does not write it."""

import math
import re
from collections.abc import Mapping
from typing import Any

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}


def dumps(values: Mapping[str, Any]) -> str:
    """Nested mappings of numbers, text, booleans and lists as a TOML document that ``tomllib`` reads back."""
    return "\n".join(_table(values, ())).strip() + "\n"


def _table(values: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    plain = {key: value for key, value in values.items() if not isinstance(value, Mapping)}
    tables = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    lines = [f"[{'.'.join(map(_key, path))}]"] if path and (plain or not tables) else []
    lines += [f"{_key(key)} = {_value(value)}" for key, value in plain.items()]
    for key, value in tables.items():
        lines += ["", *_table(value, (*path, key))]
    return lines


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _text(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    raise TypeError(f"TOML holds numbers, text, booleans, lists and tables. Got {type(value).__name__}.")


def _number(value: float) -> str:
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if math.isnan(value):
        return "nan"
    # repr is the shortest text that reads back as the same float; TOML wants a dot or an exponent, and
    # Python's exponents ("1e-05") are valid TOML.
    return repr(value)


def _text(value: str) -> str:
    escaped = "".join(_ESCAPES.get(c, c if c >= " " and c != "\x7f" else f"\\u{ord(c):04X}") for c in value)
    return f'"{escaped}"'
