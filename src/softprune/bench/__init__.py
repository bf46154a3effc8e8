"""Latency of dense and compact networks, measured in turns: how much of the MAC reduction becomes speed-up."""

from softprune.bench.backends import BACKENDS
from softprune.bench.latency import BenchReport, BenchRow, Timing, alternate, compare_latency

__all__ = ["BACKENDS", "BenchReport", "BenchRow", "Timing", "alternate", "compare_latency"]
