"""The loggers of the package: in distributed training rank 0 alone gives warnings, which all processes would repeat."""

import logging
import os
import sys


def get_logger(name: str) -> logging.Logger:
    """Return a logger. On other ranks than 0 its messages below ERROR appear only where level DEBUG is set."""
    logger = logging.getLogger(name)
    # Of a parent only handlers and level count for the messages of a logger, not filters.
    logger.addFilter(_is_shown)
    return logger


def is_rank_0() -> bool:
    """Return whether this is the only process, or rank 0 of its process group or of those that torchrun started."""
    distributed = sys.modules.get("torch.distributed")  # not imported here: `softprune --help` needs no torch
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return bool(distributed.get_rank() == 0)
    return os.environ.get("RANK", "0") == "0"


def _is_shown(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or is_rank_0() or logging.getLogger(record.name).isEnabledFor(logging.DEBUG)
