"""The errors that softprune raises for the person who caused them.

Every message says the rule, then what was got, then what to do. All of them derive from
``SoftpruneError``, which is a ``ValueError``: one ``except`` clause catches whatever softprune refuses.
"""

import re

_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def first_line(error: BaseException) -> str:
    """What another's error says, for use in ours: its first line, without colours and the last full stop."""
    lines = (line.strip() for line in _COLOUR.sub("", str(error)).splitlines())
    return next((line for line in lines if line), type(error).__name__).rstrip(".")


class SoftpruneError(ValueError):
    """Base of every error that softprune raises on purpose."""


class ModelError(SoftpruneError):
    """A network, or the example given for it, cannot be traced, masked or built."""


class PlanError(SoftpruneError):
    """A prune plan is malformed, or was made for another network."""


class VerificationError(SoftpruneError):
    """A cut network did not compute what the masked network computed; nothing was changed."""


class FileFormatError(SoftpruneError):
    """A file on disk is truncated, tampered with, or of a version that cannot be read."""


class ConfigError(SoftpruneError):
    """A setting is unknown, of the wrong type, out of range, or contradicts another one."""


class DataError(SoftpruneError):
    """A data set is missing, incomplete, or contains something that cannot be read."""


class CheckpointError(SoftpruneError):
    """A checkpoint cannot be written, read, or continued from."""
