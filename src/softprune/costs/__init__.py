"""What a model costs: MACs, activations, parameters and channels, and the fastest multiple of channels."""

from softprune.costs.exact import Cost as Cost
from softprune.costs.exact import ModuleCost as ModuleCost
from softprune.costs.exact import cost as cost
from softprune.costs.multiples import fastest_multiple as fastest_multiple
from softprune.costs.multiples import fitting_multiple as fitting_multiple
