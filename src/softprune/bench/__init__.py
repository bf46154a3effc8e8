"""Latency of dense and compact networks, measured in turns: how much of the MAC reduction becomes speed-up."""

from softprune.bench.backends import BACKENDS
from softprune.bench.measure import compare_latency
from softprune.bench.results import BenchReport, BenchRow, Timing, alternate

__all__ = ["BACKENDS", "BenchReport", "BenchRow", "Timing", "alternate", "compare_latency"]
