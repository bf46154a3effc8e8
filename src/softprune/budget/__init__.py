"""Budgets: one figure of the network that must be met at the end of the training."""

from softprune.budget.budget import Budget
from softprune.budget.controller import Controller, first_strength
from softprune.budget.fit import Cut, Fitter
from softprune.budget.latency import LatencyTable, measure_latency, time_ms
from softprune.budget.measure import Measure
from softprune.budget.target import Target, TargetLike, read_target

__all__ = [
    "Budget",
    "Controller",
    "Cut",
    "Fitter",
    "LatencyTable",
    "Measure",
    "Target",
    "TargetLike",
    "first_strength",
    "measure_latency",
    "read_target",
    "time_ms",
]
