"""Budgets: limit the MACs, parameters, activations, channels or latency of the compact network.

Start with `limit.py`: a target, and the search for a cut that meets it. `budget.py` applies it during SCP training: it
chooses channels by scores measured in `split.py` and fades them out. `latency.py` predicts latencies from a table.
"""

from softprune.budget.budget import Budget as Budget
from softprune.budget.latency import LatencyTable as LatencyTable
from softprune.budget.latency import TableLike as TableLike
from softprune.budget.latency import latency_table as latency_table
from softprune.budget.limit import BudgetStatus as BudgetStatus
from softprune.budget.limit import Limit as Limit
from softprune.budget.limit import PrunableNetwork as PrunableNetwork
from softprune.budget.split import FirstOrder as FirstOrder
