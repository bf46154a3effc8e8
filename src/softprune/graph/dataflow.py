"""One walk over the operators of a channel graph, for every analysis.

Subclass :class:`ForwardAnalysis` for facts that flow from the inputs to the outputs; `plan/coupling.py` has two. It
holds arrays with one entry per atom, moves them through channelwise operators, and leaves the rest to the subclass.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from softprune.graph.channels import IntArray
from softprune.graph.ops import (
    BinaryOp,
    ChannelwiseOp,
    ConstantOp,
    LayerCall,
    LayerOp,
    NormOp,
    Op,
    OpaqueOp,
    SelectOp,
    Use,
)


class ForwardAnalysis:
    """Visits operators in order of execution, with one method per kind, and keeps facts per atom.

    By default facts move unchanged through channelwise operators and selections, and the other operators do nothing.

    Args:
        facts: Arrays with one entry per atom of the graph.
    """

    def __init__(self, *facts: NDArray[Any]) -> None:
        self.facts = facts

    def copy(self, inputs: IntArray, outputs: IntArray) -> None:
        """Give each of `outputs` the facts of its counterpart in `inputs`."""
        for fact in self.facts:
            fact[outputs] = fact[inputs]

    def layer(self, op: LayerOp, use: Use) -> None:
        """Visit one call of a convolution or linear layer."""

    def norm(self, op: NormOp, use: Use) -> None:
        """Visit one call of a BatchNorm."""

    def channelwise(self, op: ChannelwiseOp) -> None:
        """Visit an operator that treats each channel by itself."""
        self.copy(op.inputs, op.outputs)

    def binary(self, op: BinaryOp) -> None:
        """Visit an element-wise operator on two tensors."""

    def select(self, op: SelectOp) -> None:
        """Visit a `Select` that an earlier cut inserted."""
        self.copy(op.inputs, op.outputs)

    def constant(self, op: ConstantOp) -> None:
        """Visit the output of a `ConstantOutput`."""

    def opaque(self, op: OpaqueOp) -> None:
        """Visit an operator without a rule."""

    def forward(self, ops: Iterable[Op]) -> None:
        """Call the method for the kind of each of `ops`."""
        for op in ops:
            match op:
                case LayerCall(layer=LayerOp() as layer, use=use):
                    self.layer(layer, use)
                case LayerCall(layer=NormOp() as norm, use=use):
                    self.norm(norm, use)
                case ChannelwiseOp():
                    self.channelwise(op)
                case BinaryOp():
                    self.binary(op)
                case SelectOp():
                    self.select(op)
                case ConstantOp():
                    self.constant(op)
                case OpaqueOp():
                    self.opaque(op)


def per_group(op: LayerOp, use: Use, reduce: Callable[[IntArray], Any]) -> list[Any]:
    """Return `reduce(inputs of the group)` for every output of a layer.

    Every output of a layer reads every input of its group, so that all outputs of a group share one fact.
    """
    wide = len(use.outputs) // op.groups
    return [fact for inputs in _by_group(op, use.inputs) for fact in [reduce(inputs)] * wide]


def any_in_group(op: LayerOp, use: Use, fact: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return for every output of a layer whether `fact` is true of any input of its group."""
    return np.repeat(_by_group(op, fact[use.inputs]).any(axis=1), len(use.outputs) // op.groups)


def all_in_group(op: LayerOp, use: Use, fact: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return for every output of a layer whether `fact` is true of every input of its group."""
    return np.repeat(_by_group(op, fact[use.inputs]).all(axis=1), len(use.outputs) // op.groups)


def _by_group(op: LayerOp, of_inputs: NDArray[Any]) -> NDArray[Any]:
    """Return one row per group of an array with one entry per input."""
    return of_inputs.reshape(op.groups, len(of_inputs) // op.groups)
