"""TensorBoard events, for those who have the extra installed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from softprune.errors import ConfigError


def find_writer() -> Any:
    """TensorBoard's writer, or an error that says how to get it."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "records.tensorboard needs the package tensorboard. Got an ImportError: install it with "
            '`pip install "softprune[tensorboard]"`, or set records.tensorboard = false.'
        ) from error
    return SummaryWriter


class EventWriter:
    """Writes each epoch's numbers as scalars.

    Args:
        folder: Where the event files are; every start and resume adds one.
        step: Steps that the run goes on from. What an earlier process wrote of later ones, which are trained again,
            is void from now on.
    """

    def __init__(self, folder: Path, step: int = 0) -> None:
        self._writer = find_writer()(str(folder), purge_step=step + 1)

    def write(self, row: Mapping[str, Any]) -> None:
        """Add one line of metrics.jsonl."""
        for key, value in row.items():
            if isinstance(value, int | float) and key not in ("epoch", "step"):
                self._writer.add_scalar(key, value, row["step"])
        self._writer.flush()
