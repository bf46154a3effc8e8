"""What a model costs: parameters, multiply-accumulates, channels; exactly, or by the SCP authors' rules."""

from softprune.cost.counting import cost
from softprune.cost.exact import count_exact
from softprune.cost.multiples import fastest_multiple, fitting_multiple
from softprune.cost.paper import PaperCounter, count_paper
from softprune.cost.record import Cost, ModuleCost

__all__ = [
    "Cost",
    "ModuleCost",
    "PaperCounter",
    "cost",
    "count_exact",
    "count_paper",
    "fastest_multiple",
    "fitting_multiple",
]
