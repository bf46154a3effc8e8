"""The command line: `softprune train`, `resume`, `inspect`, `compact`, `evaluate`, `report`, `compare`, and
lists.

Exit codes: 0 done, 2 an error that the message explains, 75 stopped early with everything saved (`softprune
resume`).
"""

from softprune.cli.app import main

__all__ = ["main"]
