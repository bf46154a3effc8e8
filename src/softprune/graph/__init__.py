"""From a model and an example to its channel graph."""

from softprune.graph.channel_graph import ChannelGraph, check_is_module, trace
from softprune.graph.example import Example, ExampleLike
from softprune.graph.modules import ConstantOutput, Select
from softprune.graph.sites import Frozen, Site

__all__ = [
    "ChannelGraph",
    "ConstantOutput",
    "Example",
    "ExampleLike",
    "Frozen",
    "Select",
    "Site",
    "check_is_module",
    "trace",
]
