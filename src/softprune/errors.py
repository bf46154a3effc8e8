"""Exceptions, and the parts that error messages share.

Every message states the rule, the value and the remedy. All exceptions derive from ``SoftpruneError``, which is a
``ValueError``: one ``except`` clause catches them all.
"""

import difflib
import importlib
import numbers
import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error, without colours and the final full stop."""
    lines = (line.strip() for line in _COLOUR.sub("", str(error)).splitlines())
    return next((line for line in lines if line), type(error).__name__).rstrip(".")


class SoftpruneError(ValueError):
    """Base class of all softprune exceptions."""


class ModelError(SoftpruneError):
    """A network, or the example given for it, cannot be traced, masked or built."""


class PlanError(SoftpruneError):
    """A prune plan is malformed, or was made for another network."""


class VerificationError(SoftpruneError):
    """A cut network does not compute what the masked network computes; nothing was changed."""


class FileFormatError(SoftpruneError):
    """A file on disk is truncated, tampered with, or of an unsupported version."""


class ConfigError(SoftpruneError):
    """A setting is unknown, of the wrong type, out of range, or conflicts with another one."""


class DataError(SoftpruneError):
    """A data set is missing, incomplete, or contains something that cannot be read."""


class CheckpointError(SoftpruneError):
    """A checkpoint cannot be written, read, or resumed from."""


class NonFiniteLoss(SoftpruneError):
    """The loss became infinite or not a number."""


def is_integer(value: object) -> TypeGuard[int]:
    """Whether it is an integer of Python or NumPy; a boolean is none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a real number of Python or NumPy; a boolean is none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def show(value: Any) -> str:
    """A value for a message, shortened."""
    if isinstance(value, bool):
        return str(value).lower()  # as TOML writes it
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # more digits than Python prints, or nested too deeply
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= 120 else f"{text[:117]}..."


def printable(text: str, keep: str = "") -> str:
    """Return text for a terminal or a table, with control characters, except those in `keep`, as escapes."""
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def first_few(names: Sequence[str], most: int = 3) -> str:
    """List the first names, and dots for the others."""
    return f"{', '.join(names[:most])}{' ...' if len(names) > most else ''}"


def few_of(word: str, candidates: Sequence[str]) -> str:
    """List the closest candidates, or the first ones when none is close."""
    near = difflib.get_close_matches(word, candidates, n=3) or candidates[:3]
    return f"{', '.join(map(repr, near))}{' ...' if len(candidates) > len(near) else ''}"


def check_choice(what: str, value: str, choices: Iterable[str]) -> None:
    """Raise a ConfigError for a value that is none of ``choices``, with the closest of them."""
    names = list(choices)
    if value not in names:
        raise ConfigError(f"{what} must be one of {', '.join(names)}. Got {value!r}.{nearest(str(value), names)}")


def nearest(word: str, candidates: Iterable[str]) -> str:
    """Return " Did you mean X?" for the closest candidate, or an empty string when none is close."""
    close = difflib.get_close_matches(word, list(candidates), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def import_optional(
    module: str, purpose: str, package: str = "", error: type[SoftpruneError] = ConfigError, otherwise: str = ""
) -> Any:
    """Import a module that only `purpose` needs, or raise an error that says which package to install."""
    package = package or module
    try:
        return importlib.import_module(module)
    # Compiled packages that were built for another version of torch raise the others.
    except (ImportError, RuntimeError, OSError) as problem:
        raise error(
            f"{purpose} needs the package {package}. Got {first_line(problem)!r}; install it with "
            f"`pip install {package}`{otherwise}."
        ) from problem
