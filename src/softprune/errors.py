"""The errors that softprune raises for the person who caused them.

Every message says the rule, then what was got, then what to do. All of them derive from
``SoftpruneError``, which is a ``ValueError``: one ``except`` clause catches whatever softprune refuses.
"""


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
