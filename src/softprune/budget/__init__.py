"""Budgets: one figure of the network that must be met at the end of the training.

Read `limit.py` first: a target, its measure (`measures.py`) and the search for a cut that meets it (`search.py`).
`budget.py` is what SCP does during training: it chooses channels by `importance.py` and `split.py`, and fades them.
"""

from softprune.budget.budget import Budget as Budget
from softprune.budget.importance import FirstOrder as FirstOrder
from softprune.budget.latency import LatencyTable as LatencyTable
from softprune.budget.latency import TableLike as TableLike
from softprune.budget.latency import latency_table as latency_table
from softprune.budget.limit import BudgetStatus as BudgetStatus
from softprune.budget.limit import Limit as Limit
from softprune.budget.measures import Macs as Macs
from softprune.budget.measures import PrunableNetwork as PrunableNetwork
