"""From a model and an example to its channel graph: which channels of which modules are kept or cut together.

Read `channels.py` and `ops.py` first, the vocabulary, then `channel_graph.py` (`trace`). `capture.py` gives the
operators of a forward pass, and `walk.py` hands each of them to its rule in `rules/`, which tells `builder.py` what it
does. `sites.py` and `groups.py` find the BatchNorms that can carry a mask.
"""

from softprune.graph.channel_graph import ChannelGraph as ChannelGraph
from softprune.graph.channel_graph import check_is_bare as check_is_bare
from softprune.graph.channel_graph import check_is_module as check_is_module
from softprune.graph.channel_graph import trace as trace
from softprune.graph.example import Example as Example
from softprune.graph.example import ExampleLike as ExampleLike
from softprune.graph.modules import ConstantOutput as ConstantOutput
from softprune.graph.modules import Select as Select
from softprune.graph.ops import Frozen as Frozen
from softprune.graph.ops import Site as Site
from softprune.graph.rules.registry import Activation as Activation
from softprune.graph.rules.registry import Operator as Operator
from softprune.graph.rules.registry import add_operator as add_operator
