"""Which channels of every tensor remain, given the constants: the analysis runs from the outputs to the inputs.

Two facts per class of atoms. A channel is *demanded* if a layer that is still computed reads it and cannot do without
it. It is *present* if it is demanded, or tied to a demanded one, or fills up a group, a floor or a multiple. Both sets
only grow, so that the iteration ends; what is demanded is present.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from softprune.cut.constants import FloatArray
from softprune.graph import ChannelGraph
from softprune.graph.channels import IntArray
from softprune.graph.ops import ConstantOp, LayerCall, LayerOp, NormOp, OpaqueOp, SelectOp

BoolArray = NDArray[np.bool_]


@dataclass
class Liveness:
    """The two facts for every channel of a graph; call :meth:`solve` before asking."""

    graph: ChannelGraph
    values: FloatArray
    """The constant value of every atom, NaN for atoms that are not constant."""
    round_to: int = 1
    gathers: bool = True
    """Whether layers may read a part of their input through a gather."""
    kept_for_shape: list[str] = field(default_factory=list)
    """Modules that keep one channel although nothing reads it."""
    demanded: BoolArray = field(init=False)
    present: BoolArray = field(init=False)
    _dispensable: dict[str, BoolArray] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        size = len(self.graph.classes)
        self.demanded = np.zeros(size, dtype=bool)
        self.demanded[self.graph.pinned] = True
        self.present = self.demanded.copy()

    # --- questions ---------------------------------------------------------------------------------------------

    def is_present(self, atoms: IntArray) -> BoolArray:
        return self.present[self.graph.classes[atoms]]

    def is_demanded(self, atoms: IntArray) -> BoolArray:
        return self.demanded[self.graph.classes[atoms]]

    def selects(self, layer: LayerOp | NormOp) -> bool:
        """Return whether `layer` may read a part of its input through a gather."""
        return self.gathers and layer.selectable

    def dispensable(self, layer: LayerOp) -> BoolArray:
        """Return the inputs that `layer` can do without: zeros, and constants that fold into its bias."""
        if layer.name not in self._dispensable:
            folds = layer.replaceable and not layer.padded and layer.groups == 1 and not layer.aliases
            first = self.values[layer.inputs]
            dispensable = ~np.isnan(first) if folds else first == 0
            for use in layer.uses[1:]:
                dispensable &= self.values[use.inputs] == first
            self._dispensable[layer.name] = dispensable
        return self._dispensable[layer.name]

    def is_constant(self, layer: LayerOp) -> bool:
        """Return whether `layer` computes nothing: no output is demanded, or all outputs are constant."""
        if not layer.replaceable:
            return False
        if not self.is_demanded(layer.outputs).any():
            return True
        values = self.values[layer.outputs]
        return all(np.array_equal(self.values[use.outputs], values) for use in layer.uses)  # NaN equals nothing

    # --- solving -----------------------------------------------------------------------------------------------

    def solve(self) -> Liveness:
        """Grow both sets until every rule holds."""
        while True:
            self._propagate()
            if self._fill_equal_widths() | self._fill_groups() | self._fill_multiples():
                continue
            if not self._floor():
                return self

    def _propagate(self) -> None:
        while True:
            before = (int(self.demanded.sum()), int(self.present.sum()))
            for layer in self._backwards():
                self._propagate_to_inputs(layer)
            for op in self.graph.ops:
                if isinstance(op, OpaqueOp) and op.skips_zeros:
                    for atoms in op.inputs:
                        self._read(atoms, self.values[atoms] != 0)
            if before == (int(self.demanded.sum()), int(self.present.sum())):
                return

    def _backwards(self) -> Iterator[LayerOp | NormOp | SelectOp]:
        """Yield what reads channels, from the outputs to the inputs."""
        for op in reversed(self.graph.ops):
            layer = op.layer if isinstance(op, LayerCall) else op
            if isinstance(layer, (LayerOp, NormOp, SelectOp)):
                yield layer

    def _propagate_to_inputs(self, layer: LayerOp | NormOp | SelectOp) -> None:
        """Pass what is demanded and present in the outputs of `layer` on to its inputs."""
        if isinstance(layer, LayerOp):
            self._demand_inputs(layer)
            return
        classes = self.graph.classes
        self.demanded[classes[layer.inputs[self.is_demanded(layer.outputs)]]] = True
        self.present[classes[layer.inputs[self.is_present(layer.outputs)]]] = True
        if isinstance(layer, NormOp) and not self.selects(layer):
            # No gather fits here: every input channel is an output channel, zeroed where it is masked.
            self.present[classes[layer.outputs[self.is_present(layer.inputs)]]] = True

    def _demand_inputs(self, layer: LayerOp) -> None:
        classes = self.graph.classes
        if depthwise(layer):
            multiplier = len(layer.outputs) // len(layer.inputs)
            outputs = layer.outputs.reshape(-1, multiplier)[:, 0]
            self.present[classes[layer.inputs[self.is_present(outputs)]]] = True
            if not self.selects(layer):
                self.present[classes[outputs[self.is_present(layer.inputs)]]] = True
            if not self.is_constant(layer):
                self.demanded[classes[layer.inputs[self.is_demanded(outputs) & ~self.dispensable(layer)]]] = True
            return
        if self.is_constant(layer):
            return
        needed = ~self.dispensable(layer)
        read = self.is_demanded(layer.outputs).reshape(layer.groups, -1).any(axis=1)
        needed &= np.repeat(read, len(layer.inputs) // layer.groups)
        self._read(layer.inputs, needed)

    def _read(self, atoms: IntArray, needed: BoolArray) -> None:
        """Demand those of `atoms` that are `needed`. What is called reads at least one channel, dead or alive."""
        demanded = self.graph.classes[atoms[needed]]
        self.demanded[demanded] = self.present[demanded] = True
        if not self.is_present(atoms).any():
            self.present[self.graph.classes[atoms[0]]] = True

    def _fill_equal_widths(self) -> bool:
        changed = False
        for widths in self.graph.equal_widths:
            counts = [int(self.is_present(piece).sum()) for piece in widths.pieces]
            for piece, count in zip(widths.pieces, counts, strict=True):
                changed |= self._add(piece, max(counts) - count)
        return changed

    def _fill_groups(self) -> bool:
        """Give the remaining groups of a grouped convolution equally many inputs, and equally many outputs."""
        changed = False
        for layer in self.graph.layers:
            if layer.groups == 1 or depthwise(layer) or self.is_constant(layer):
                continue
            inputs, outputs = layer.inputs.reshape(layer.groups, -1), layer.outputs.reshape(layer.groups, -1)
            remaining = self.groups_left(layer)
            if not remaining:
                continue
            most_outputs = max(int(self.is_present(outputs[group]).sum()) for group in remaining)
            most_inputs = max(1, *(len(self.group_inputs(layer, group)) for group in remaining))
            for group in remaining:
                changed |= self._add(outputs[group], most_outputs - int(self.is_present(outputs[group]).sum()))
                changed |= self._add(inputs[group], most_inputs - int(self.is_present(inputs[group]).sum()))
        return changed

    def groups_left(self, layer: LayerOp) -> list[int]:
        """Return the groups of `layer` that are still computed."""
        present = self.is_present(layer.outputs).reshape(layer.groups, -1).any(axis=1)
        if not self.selects(layer):
            present |= self.is_present(layer.inputs).reshape(layer.groups, -1).any(axis=1)
        return np.flatnonzero(present).tolist()

    def group_inputs(self, layer: LayerOp, group: int) -> IntArray:
        """Return the inputs that one group must read, by their position in the group."""
        present = self.is_present(layer.inputs).reshape(layer.groups, -1)[group]
        if self.selects(layer):
            present = present & ~self.dispensable(layer).reshape(layer.groups, -1)[group]
        return np.flatnonzero(present)

    def _fill_multiples(self) -> bool:
        if self.round_to == 1:
            return False
        changed = False
        for layer in self.graph.layers:
            if self.is_constant(layer) or (layer.groups > 1 and not depthwise(layer)):
                continue
            changed |= self._add(layer.outputs, -int(self.is_present(layer.outputs).sum()) % self.round_to)
        for norm in self.graph.norms:
            # The others have the width of their input; what nothing demands may have any width.
            if self.selects(norm) and self.is_demanded(norm.outputs).any():
                here = norm.outputs[self.is_present(norm.inputs)]
                changed |= self._add(here, -int(self.is_present(here).sum()) % self.round_to)
        return changed

    def _floor(self) -> bool:
        """Keep one channel of every module that kept none: nothing can be called without channels."""
        changed = False
        for layer in self._backwards():
            if not self.is_present(layer.outputs).any():
                # A channelwise operator keeps one that is present anyway; argmax of booleans is the first True, or 0.
                choice = 0 if isinstance(layer, LayerOp) else int(self.is_present(layer.inputs).argmax())
                self.present[self.graph.classes[layer.outputs[choice]]] = True
                self.kept_for_shape.append(layer.name)
                self._propagate_to_inputs(layer)
                changed = True
        for op in self.graph.ops:
            if isinstance(op, ConstantOp) and not self.is_present(op.outputs).any():
                self.present[self.graph.classes[op.outputs[0]]] = True
                self.kept_for_shape.append(op.name)
                changed = True
        return changed

    def _add(self, atoms: IntArray, count: int) -> bool:
        """Make up to `count` more of `atoms` present."""
        absent = np.flatnonzero(~self.is_present(atoms))[: max(count, 0)]
        self.present[self.graph.classes[atoms[absent]]] = True
        return len(absent) > 0


def depthwise(layer: LayerOp) -> bool:
    """Return whether each group has one input channel."""
    return layer.groups > 1 and layer.groups == len(layer.inputs)
