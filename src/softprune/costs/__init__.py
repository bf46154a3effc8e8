"""What a model costs: parameters, multiply-accumulates, channels; exactly, or by the SCP authors' rules."""

from softprune.costs.exact import count_exact
from softprune.costs.multiples import fastest_multiple, fitting_multiple
from softprune.costs.paper import PaperCounter, cost
from softprune.costs.record import Cost, ModuleCost

__all__ = ["Cost", "ModuleCost", "PaperCounter", "cost", "count_exact", "fastest_multiple", "fitting_multiple"]
