"""From a model and an example to its channel graph: which channels of which modules are kept or cut together.

Read `channels.py` first, the vocabulary and the graph, then `tracing.py` (`trace`), which fills it. `reader.py` gives
the operators of a forward pass. `operators.py` is the table of their rules, of which those that move data are in
`movements.py`; they tell `builder.py` what an operator does. `sites.py` finds the BatchNorms that can carry a mask.
"""

from softprune.graph.builder import Activation as Activation
from softprune.graph.builder import Operator as Operator
from softprune.graph.channels import ChannelGraph as ChannelGraph
from softprune.graph.channels import Frozen as Frozen
from softprune.graph.channels import Site as Site
from softprune.graph.modules import ConstantOutput as ConstantOutput
from softprune.graph.modules import Select as Select
from softprune.graph.operators import add_operator as add_operator
from softprune.graph.operators import pointwise as pointwise
from softprune.graph.operators import spatial as spatial
from softprune.graph.reader import Example as Example
from softprune.graph.reader import ExampleLike as ExampleLike
from softprune.graph.tracing import check_is_bare as check_is_bare
from softprune.graph.tracing import check_is_module as check_is_module
from softprune.graph.tracing import trace as trace
