"""Loggers of the package. In distributed training only rank 0 logs warnings, which all ranks would repeat."""

import logging
import os
import sys


def get_logger(name: str) -> logging.Logger:
    """Return a logger that, on ranks other than 0, drops messages below ERROR unless its level is DEBUG."""
    logger = logging.getLogger(name)
    # Each logger needs the filter: filters of a parent do not apply to messages of its children.
    logger.addFilter(_is_shown)
    return logger


def is_rank_0() -> bool:
    """Return whether this is the only process, or rank 0 of its process group or of torchrun's processes."""
    distributed = sys.modules.get("torch.distributed")  # not imported here: `softprune --help` needs no torch
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return bool(distributed.get_rank() == 0)
    return os.environ.get("RANK", "0") == "0"


def _is_shown(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or is_rank_0() or logging.getLogger(record.name).isEnabledFor(logging.DEBUG)
