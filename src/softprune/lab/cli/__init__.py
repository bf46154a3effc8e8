"""The `softprune` command.

Exit codes: 0 success; 1 some runs of a sweep failed; 2 an error that the user can correct; 75 stopped early with
everything saved (`softprune resume` continues).
"""

from softprune.lab.cli import runs, networks  # noqa: I001 - in the order of the help
from softprune.lab.cli.app import main

__all__ = ["main", "networks", "runs"]
