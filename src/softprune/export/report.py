"""What an export gives back: the file, and how close its own runtime came to the network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """A file that was written and checked. Prints as one line."""

    path: Path
    format: str
    """"onnx" or "pt2"."""
    bytes: int
    """Size of the file."""
    runtime: str
    """What ran the file for the check, with its version."""
    max_difference: float
    """Largest |network - file| over all outputs and inputs tried."""
    scale: float
    """Largest |output| of the network."""
    inputs: tuple[str, ...]
    """Shapes of the inputs tried."""
    folded: int = 0
    """BatchNorms that were folded into the layer before them."""

    def __str__(self) -> str:
        folded = f", {self.folded} BatchNorms folded" if self.folded else ""
        return (
            f"{self.path}: {self.bytes:,} bytes{folded}; {self.runtime} differs by at most "
            f"{self.max_difference:.1e} at output scale {self.scale:.1e} (inputs {'; '.join(self.inputs)})"
        )
