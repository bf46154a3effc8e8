"""Build the channel graph of a model: which channels of which modules are kept or cut together.

Start with `channels.py`, the data structures, then read `tracing.py` (`trace`), which builds the graph. `reader.py`
records the operators of a forward pass. `operators.py` is the table of their rules; rules of data movements are in
`movements.py`. Rules use `builder.py` to add to the graph. `sites.py` finds the BatchNorms that can be masked.
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
