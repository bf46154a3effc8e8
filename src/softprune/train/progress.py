"""What a run tells whoever watches it; the command line draws it, a notebook may ignore it."""

from collections.abc import Mapping
from typing import Any


class Listener:
    """Receives a run's events. Every method does nothing here: override what you want to see."""

    def on_stage(self, text: str) -> None:
        """A new stage begins: the dense baseline, a cut, fine-tuning, measuring."""

    def on_epoch_start(self, epoch: int, epochs: int, steps: int) -> None:
        """Epoch ``epoch`` (zero-based) of ``epochs`` begins; it has ``steps`` steps."""

    def on_step(self, done: int) -> None:
        """``done`` steps of the epoch are finished."""

    def on_epoch(self, row: Mapping[str, Any], dense: Mapping[str, Any]) -> None:
        """An epoch ended: its line of metrics.jsonl, and the dense network's cost to compare with."""
