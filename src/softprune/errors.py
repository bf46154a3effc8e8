"""Exceptions, and helpers for error messages.

Every message states the rule, the value and the remedy. All exceptions derive from ``SoftpruneError``, which is a
``ValueError``.
"""

import difflib
import importlib
import numbers
import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error, without colour codes and the final full stop."""
    lines = (line.strip() for line in _COLOUR.sub("", str(error)).splitlines())
    return next((line for line in lines if line), type(error).__name__).rstrip(".")


class SoftpruneError(ValueError):
    """Base class of all softprune exceptions."""


class ModelError(SoftpruneError):
    """A network or its example cannot be traced, masked or built."""


class PlanError(SoftpruneError):
    """A plan is malformed or belongs to another network."""


class VerificationError(SoftpruneError):
    """The outputs of a changed network, such as a compact one, differ from those of the original network."""


class FileFormatError(SoftpruneError):
    """A file is damaged, unreadable, of another kind, or of an unsupported version."""


class ConfigError(SoftpruneError):
    """A setting is unknown, has the wrong type, is out of range, or conflicts with another one."""


class DataError(SoftpruneError):
    """A data set is missing, incomplete or contains unreadable items."""


class CheckpointError(SoftpruneError):
    """A checkpoint cannot be written, read, or resumed from."""


class NonFiniteLoss(SoftpruneError):
    """The loss is infinite or NaN."""


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer of Python or NumPy, but not a boolean."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a real number of Python or NumPy, but not a boolean."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def show(value: Any) -> str:
    """Format a value for a message, in at most 120 characters."""
    if isinstance(value, bool):
        return str(value).lower()  # as in TOML
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer with too many digits, or too much nesting
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= 120 else f"{text[:117]}..."


def printable(text: str, keep: str = "") -> str:
    """Escape control characters, except those in `keep`, so that text can be printed in a terminal or table."""
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def first_few(names: Sequence[str], most: int = 3) -> str:
    """Join the first `most` names; dots stand for the others."""
    return f"{', '.join(names[:most])}{' ...' if len(names) > most else ''}"


def few_of(word: str, candidates: Sequence[str]) -> str:
    """Join the three candidates closest to `word`, or the first three if none is close."""
    near = difflib.get_close_matches(word, candidates, n=3) or candidates[:3]
    return f"{', '.join(map(repr, near))}{' ...' if len(candidates) > len(near) else ''}"


def check_choice(what: str, value: str, choices: Iterable[str]) -> None:
    """Raise a ConfigError, with a suggestion, unless ``value`` is one of ``choices``."""
    names = list(choices)
    if value not in names:
        raise ConfigError(f"{what} must be one of {', '.join(names)}. Got {value!r}.{nearest(str(value), names)}")


def nearest(word: str, candidates: Iterable[str]) -> str:
    """Return " Did you mean X?" for the closest candidate, or an empty string if none is close."""
    close = difflib.get_close_matches(word, list(candidates), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def import_optional(
    module: str, purpose: str, package: str = "", error: type[SoftpruneError] = ConfigError, otherwise: str = ""
) -> Any:
    """Import an optional dependency needed for `purpose`, or raise an error that says which package to install."""
    package = package or module
    try:
        return importlib.import_module(module)
    # Packages compiled for another version of PyTorch raise RuntimeError or OSError.
    except (ImportError, RuntimeError, OSError) as problem:
        absent = isinstance(problem, ModuleNotFoundError)
        remedy = f"install it with `pip install {package}`" if absent else "install the build that fits your torch"
        raise error(
            f"{purpose} needs the package {package}. Got {first_line(problem)!r}; {remedy}{otherwise}."
        ) from problem
