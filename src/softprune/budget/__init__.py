"""Budgets: one figure of the network that must be met at the end of the training.

Read `limit.py` first: a target, and the search for a cut that meets it. `budget.py` is what SCP does in training: it
chooses channels by what `split.py` measures, and fades them. `latency.py` is the table behind a target in milliseconds.
"""

from softprune.budget.budget import Budget as Budget
from softprune.budget.latency import LatencyTable as LatencyTable
from softprune.budget.latency import TableLike as TableLike
from softprune.budget.latency import latency_table as latency_table
from softprune.budget.limit import BudgetStatus as BudgetStatus
from softprune.budget.limit import Limit as Limit
from softprune.budget.limit import PrunableNetwork as PrunableNetwork
from softprune.budget.split import FirstOrder as FirstOrder
