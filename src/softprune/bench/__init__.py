"""Dense against compact, measured side by side: how much of the saved arithmetic is saved time."""

from softprune.bench.backends import BACKENDS
from softprune.bench.compare import compare
from softprune.bench.report import BenchReport, BenchRow
from softprune.bench.timing import Timing, alternate

__all__ = ["BACKENDS", "BenchReport", "BenchRow", "Timing", "alternate", "compare"]
