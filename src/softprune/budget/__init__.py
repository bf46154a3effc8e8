"""Budgets: one figure of the network that must be met at the end of the training."""

from softprune.budget.budget import Budget
from softprune.budget.controller import Controller, first_strength
from softprune.budget.latency import LatencyTable, measure_latency
from softprune.budget.limit import BudgetStatus, Limit
from softprune.budget.measures import MEASURES, Macs, Measure, PrunableNetwork
from softprune.budget.search import Cut, CutSearch
from softprune.budget.weighting import CostWeights
from softprune.config.target import Target, TargetLike, read_target

__all__ = [
    "MEASURES",
    "Budget",
    "BudgetStatus",
    "Controller",
    "CostWeights",
    "Cut",
    "CutSearch",
    "LatencyTable",
    "Limit",
    "Macs",
    "Measure",
    "PrunableNetwork",
    "Target",
    "TargetLike",
    "first_strength",
    "measure_latency",
    "read_target",
]
