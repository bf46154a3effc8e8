"""What a model costs: MACs, activations, parameters and channels."""

from softprune.costs.exact import Cost as Cost
from softprune.costs.exact import ModuleCost as ModuleCost
from softprune.costs.exact import cost as cost
