"""What a model costs: MACs, activations, parameters and channels; exactly, or by the SCP authors' rules."""

from softprune.costs.exact import Cost, ModuleCost, count_exact
from softprune.costs.multiples import fastest_multiple, fitting_multiple
from softprune.costs.paper import PaperCounter, cost

__all__ = ["Cost", "ModuleCost", "PaperCounter", "cost", "count_exact", "fastest_multiple", "fitting_multiple"]
