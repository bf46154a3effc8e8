"""Unread flows backward: which channels somebody still needs, and which must be there for the shapes' sake.

Two facts per class of atoms: *demanded* (a layer that is still computed reads it, and it is no constant the layer
can do without) and *present* (demanded, or tied to something demanded, or filling up a group, a floor or a multiple).
Both only grow, so a few sweeps settle them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from softprune.graph import ChannelGraph
from softprune.graph.channels import IntArray
from softprune.graph.ops import ConstantOp, LayerCall, LayerOp, NormOp, SelectOp
from softprune.plan.constants import FloatArray

BoolArray = NDArray[np.bool_]


@dataclass
class Liveness:
    """The settled facts, and how to ask for them."""

    graph: ChannelGraph
    values: FloatArray
    """Constants per atom, NaN for live ones."""
    round_to: int = 1
    gathers: bool = True
    """Whether layers may read a part of their input through an index."""
    floored: list[str] = field(default_factory=list)
    """Modules that kept one channel although nobody reads them."""
    demanded: BoolArray = field(init=False)
    present: BoolArray = field(init=False)

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
        """Whether `layer` may read a part of what comes in."""
        return self.gathers and layer.selectable

    def can_miss(self, mix: LayerOp) -> BoolArray:
        """The inputs that `mix` can do without: zeros, and constants that fold into its bias."""
        folds = mix.replaceable and not mix.padded and mix.groups == 1 and not mix.aliases
        first = self.values[mix.inputs]
        missable = ~np.isnan(first) if folds else first == 0
        for use in mix.uses[1:]:
            missable &= self.values[use.inputs] == first
        return missable

    def is_void(self, mix: LayerOp) -> bool:
        """Whether `mix` has nothing to compute: nobody demands it, or it gives a constant whatever comes in."""
        if not mix.replaceable:
            return False
        if not any(self.is_demanded(use.outputs).any() for use in mix.uses):
            return True
        if not self.can_miss(mix).all():
            return False
        outputs = [self.values[use.outputs] for use in mix.uses]
        return all(np.array_equal(other, outputs[0]) for other in outputs) and not np.isnan(outputs[0]).any()

    # --- settling ----------------------------------------------------------------------------------------------

    def settle(self) -> Liveness:
        """Grow both facts until every rule holds."""
        while True:
            self._propagate()
            if self._fill_balances() | self._fill_groups() | self._fill_multiples():
                continue
            if not self._floor():
                return self

    def _propagate(self) -> None:
        while True:
            before = (int(self.demanded.sum()), int(self.present.sum()))
            for layer in self._backwards():
                self._ask(layer)
            self.present |= self.demanded
            if before == (int(self.demanded.sum()), int(self.present.sum())):
                return

    def _backwards(self) -> Iterator[LayerOp | NormOp | SelectOp]:
        """What reads channels, from the outputs to the inputs."""
        for record in reversed(self.graph.ops):
            layer = record.layer if isinstance(record, LayerCall) else record
            if isinstance(layer, (LayerOp, NormOp, SelectOp)):
                yield layer

    def _ask(self, layer: LayerOp | NormOp | SelectOp) -> None:
        """Pass on what is demanded and present behind `layer` to what comes into it."""
        if isinstance(layer, LayerOp):
            self._demand_inputs(layer)
            return
        self._follow(layer.inputs, layer.outputs)
        if isinstance(layer, NormOp) and not self.selects(layer):
            # No place for an index: what comes in goes out, zeroed where it was masked.
            self.present[self.graph.classes[layer.outputs[self.is_present(layer.inputs)]]] = True

    def _follow(self, inputs: IntArray, outputs: IntArray) -> None:
        """Channel by channel: what leaves must have come in."""
        classes = self.graph.classes
        self.demanded[classes[inputs[self.is_demanded(outputs)]]] = True
        self.present[classes[inputs[self.is_present(outputs)]]] = True

    def _demand_inputs(self, mix: LayerOp) -> None:
        classes = self.graph.classes
        if depthwise(mix):
            multiplier = len(mix.outputs) // len(mix.inputs)
            outputs = mix.outputs.reshape(-1, multiplier)[:, 0]
            self.present[classes[mix.inputs[self.is_present(outputs)]]] = True
            if not self.selects(mix):
                self.present[classes[outputs[self.is_present(mix.inputs)]]] = True
            if not self.is_void(mix):
                self.demanded[classes[mix.inputs[self.is_demanded(outputs) & ~self.can_miss(mix)]]] = True
            return
        if self.is_void(mix):
            return
        needed = ~self.can_miss(mix)
        read = self.is_demanded(mix.outputs).reshape(mix.groups, -1).any(axis=1)
        needed &= np.repeat(read, len(mix.inputs) // mix.groups)
        self.demanded[classes[mix.inputs[needed]]] = True
        if not needed.any() and not self.is_present(mix.inputs).any():
            self.present[classes[mix.inputs[0]]] = True  # it is called, so it must read something

    def _fill_balances(self) -> bool:
        changed = False
        for balance in self.graph.equal_widths:
            counts = [int(self.is_present(piece).sum()) for piece in balance.pieces]
            for piece, count in zip(balance.pieces, counts, strict=True):
                changed |= self._add(piece, max(counts) - count)
        return changed

    def _fill_groups(self) -> bool:
        """The groups of a grouped convolution that remain have equally many inputs, and equally many outputs."""
        changed = False
        for mix in self.graph.layers:
            if mix.groups == 1 or depthwise(mix) or self.is_void(mix):
                continue
            inputs, outputs = mix.inputs.reshape(mix.groups, -1), mix.outputs.reshape(mix.groups, -1)
            remaining = self.groups_left(mix)
            if not remaining:
                continue
            most_outputs = max(int(self.is_present(outputs[group]).sum()) for group in remaining)
            most_inputs = max(1, *(len(self.group_inputs(mix, group)) for group in remaining))
            for group in remaining:
                changed |= self._add(
                    outputs[group], most_outputs - int(self.is_present(outputs[group]).sum())
                )
                changed |= self._add(inputs[group], most_inputs - int(self.is_present(inputs[group]).sum()))
        return changed

    def groups_left(self, mix: LayerOp) -> list[int]:
        """The groups of `mix` that are still computed."""
        present = self.is_present(mix.outputs).reshape(mix.groups, -1).any(axis=1)
        if not self.selects(mix):
            present |= self.is_present(mix.inputs).reshape(mix.groups, -1).any(axis=1)
        return np.flatnonzero(present).tolist()

    def group_inputs(self, mix: LayerOp, group: int) -> IntArray:
        """The inputs that one group must read, by their number within the group."""
        present = self.is_present(mix.inputs).reshape(mix.groups, -1)[group]
        if self.selects(mix):
            present = present & ~self.can_miss(mix).reshape(mix.groups, -1)[group]
        return np.flatnonzero(present)

    def _fill_multiples(self) -> bool:
        if self.round_to == 1:
            return False
        changed = False
        for mix in self.graph.layers:
            if self.is_void(mix) or (mix.groups > 1 and not depthwise(mix)):
                continue
            changed |= self._add(mix.outputs, -int(self.is_present(mix.outputs).sum()) % self.round_to)
        for norm in self.graph.norms:
            # The others have the width of what comes in; and what nobody demands may be as narrow as it likes.
            if self.selects(norm) and self.is_demanded(norm.outputs).any():
                here = norm.outputs[self.is_present(norm.inputs)]
                changed |= self._add(here, -int(self.is_present(here).sum()) % self.round_to)
        return changed

    def _floor(self) -> bool:
        """Nothing can be called without channels: who kept none keeps one."""
        changed = False
        for layer in self._backwards():
            if not self.is_present(layer.outputs).any():
                # Channel by channel, the one that comes in anyway; argmax of booleans is the first True, or 0.
                choice = 0 if isinstance(layer, LayerOp) else int(self.is_present(layer.inputs).argmax())
                self.present[self.graph.classes[layer.outputs[choice]]] = True
                self.floored.append(layer.name)
                self._ask(layer)
                changed = True
        for record in self.graph.ops:
            if isinstance(record, ConstantOp) and not self.is_present(record.outputs).any():
                self.present[self.graph.classes[record.outputs[0]]] = True
                self.floored.append(record.name)
                changed = True
        return changed

    def _add(self, atoms: IntArray, count: int) -> bool:
        """Make up to `count` more of `atoms` present."""
        absent = np.flatnonzero(~self.is_present(atoms))[: max(count, 0)]
        self.present[self.graph.classes[atoms[absent]]] = True
        return len(absent) > 0


def depthwise(mix: LayerOp) -> bool:
    """One input channel per group: channels pass one by one."""
    return mix.groups > 1 and mix.groups == len(mix.inputs)
