"""From a model and an example to its channel graph."""

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
