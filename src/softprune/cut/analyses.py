"""Analyses of a channel graph: constants under hard masks, channels that must stay, and coupled sites.

`constants` finds the channels that are constant under the masks. `Liveness` works backwards from the outputs to find
the channels that must stay. `coupled_sites` and `required_sites` do not depend on masks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from softprune.graph import ChannelGraph
from softprune.graph.channels import (
    PAD,
    BinaryOp,
    ChannelwiseOp,
    ConstantOp,
    FloatArray,
    ForwardAnalysis,
    FreeParameter,
    IntArray,
    LayerOp,
    NormOp,
    OpaqueOp,
    Reader,
    SelectOp,
    Use,
    evaluated,
    identity,
)
from softprune.graph.reader import first_floating

# --- constants --------------------------------------------------------------------------------------------------------

BoolArray = NDArray[np.bool_]


def constants(graph: ChannelGraph, model: nn.Module, masks: Mapping[str, BoolArray]) -> FloatArray:
    """Return the constant value of every atom in float64; NaN for atoms that vary over batch or space.

    Dropped channels are exactly zero. Another BatchNorm maps zero to a different constant, activations map constants to
    constants, and layers that read only constants return constants. Values that depend only on parameters outside
    layers, such as an embedding, do not count as constants, since training changes them. Infinities do not either, but
    are tracked, since zero times infinity is not zero.
    """
    return _Constants(graph, model, masks).forward(graph.ops).known(np.arange(len(graph.classes)))


class _Constants(ForwardAnalysis):
    """Propagates constants. Most channels are not constant, so outputs are NaN unless inputs are constants."""

    def __init__(self, graph: ChannelGraph, model: nn.Module, masks: Mapping[str, BoolArray]) -> None:
        self.model, self.masks = model, masks
        like = first_floating(model)
        self.device = torch.device("cpu") if like is None or like.is_meta else like.device
        self.values: FloatArray = np.full(len(graph.classes), np.nan)
        self.values[PAD] = 0.0
        self.trained = np.zeros(len(graph.classes), dtype=bool)
        for parameter in graph.free_parameters.values():
            self.values[parameter.atoms] = _parameter_values(parameter, model)
            self.trained[parameter.atoms] = True
        super().__init__(self.values, self.trained)

    def known(self, atoms: IntArray) -> FloatArray:
        """Return the values of `atoms`; NaN for infinities and for values that depend only on parameters."""
        values = self.values[atoms]
        values[np.isinf(values) | self.trained[atoms]] = np.nan
        return values

    def layer(self, op: LayerOp, use: Use) -> None:
        # Zero padding around a nonzero constant adds a border, so the output is not constant.
        prevents = self.values[use.inputs] if op.padded else np.isnan(self.values[use.inputs])
        if op.groups == 1 and prevents.any():
            return
        by_group = self.known(use.inputs).reshape(op.groups, -1)
        zero = (by_group == 0).all(axis=1)
        constant = zero if op.padded else ~np.isnan(by_group).any(axis=1)
        if not constant.any():
            return
        module: Any = self.model.get_submodule(op.name)
        bias = np.zeros(len(use.outputs)) if module.bias is None else _array(module.bias)
        out: FloatArray = np.full((op.groups, len(use.outputs) // op.groups), np.nan)
        out[constant] = bias.reshape(out.shape)[constant]
        weighted = constant & ~zero
        if weighted.any():
            weight = _array(module.weight)
            weight = weight.reshape(*weight.shape[:2], -1).sum(axis=2)
            grouped = weight.reshape(op.groups, -1, weight.shape[1])
            out[weighted] += np.einsum("goi,gi->go", grouped, np.nan_to_num(by_group))[weighted]
        self.values[use.outputs] = out.ravel()

    def norm(self, op: NormOp, use: Use) -> None:
        kept = self.masks.get(op.name, np.True_)
        if (kept & ~np.isnan(self.values[use.inputs])).any():
            self.values[use.outputs] = _normalised(self.model.get_submodule(op.name), self.known(use.inputs))
        if op.name in self.masks:
            self.values[use.outputs[~kept]] = 0.0

    def channelwise(self, op: ChannelwiseOp) -> None:
        values = np.asarray(self.values[op.inputs])
        self.trained[op.outputs] = self.trained[op.inputs]
        if op.evaluate is not identity:
            known = np.isfinite(values)
            given = values[known]
            if op.evaluate is None:
                values[known] = np.where(given == 0, op.at_zero, np.nan)
            else:  # usually all are dropped channels, for which the cached value at zero is used
                zero = op.at_zero_on(self.device)
                values[known] = evaluated(op.evaluate, given, device=self.device) if given.any() else zero
        self.values[op.outputs] = values

    def binary(self, op: BinaryOp) -> None:
        left, right = self.values[op.left], self.values[op.right]
        self.trained[op.outputs] = self.trained[op.left] & self.trained[op.right]
        if np.isnan(left).all() and np.isnan(right).all():
            return
        infinite = np.isinf(left) | np.isinf(right)
        out: FloatArray = np.where(infinite, np.inf, np.nan)
        known = np.isfinite(left) & np.isfinite(right)
        if known.any():
            out[known] = evaluated(op.evaluate, left[known], right[known])
        if op.absorbs_zero:
            # A parameter that is zero, such as a newly initialised layer scale, may change in training.
            dead_left = (left == 0) & ~self.trained[op.left]
            dead_right = (right == 0) & ~self.trained[op.right]
            out[(dead_left | dead_right) & ~infinite] = 0.0
        self.values[op.outputs] = out

    def constant(self, op: ConstantOp) -> None:
        self.values[op.outputs] = op.values.numpy()


def _array(tensor: Tensor) -> FloatArray:
    if tensor.is_meta:
        return np.full(tuple(tensor.shape), np.nan)
    return tensor.detach().to("cpu", torch.float64).numpy()


def _normalised(module: Any, inputs: FloatArray) -> FloatArray:
    if getattr(module, "running_mean", None) is None:  # normalises by the statistics of its input
        out = np.where(inputs == 0, 0.0, np.nan)
    else:
        out = (inputs - _array(module.running_mean)) / np.sqrt(_array(module.running_var) + module.eps)
    if module.weight is not None:
        out = out * _array(module.weight) + _array(module.bias)
    return out


def _parameter_values(parameter: FreeParameter, model: nn.Module) -> FloatArray | float:
    """Return the values of a parameter outside layers; NaN unless it has one value per channel."""
    path, _, attribute = parameter.name.rpartition(".")
    tensor: Tensor = getattr(model.get_submodule(path), attribute)
    if tensor.is_complex() or tensor.numel() != len(parameter.atoms):
        return np.nan
    return _array(tensor).ravel()


def constant_contribution(weight: Tensor, kept: IntArray, values: FloatArray) -> Tensor:
    """Return the contribution of the inputs not in `kept`, with constant `values`, to the outputs of a layer."""
    dropped = values.copy()
    dropped[kept] = 0.0
    columns = weight.detach().to("cpu", torch.float64)
    return columns.reshape(*columns.shape[:2], -1).sum(dim=2) @ torch.from_numpy(dropped)


# --- channels that stay -----------------------------------------------------------------------------------------------


class Liveness:
    """Computes which channels of each tensor stay, given the constants. Call :meth:`solve` before any query.

    There are two facts per class of atoms. A channel is *demanded* if a layer that is still computed needs its value.
    It is *present* if it is demanded, tied to a demanded channel, or fills up a group, a floor or a multiple. Demanded
    channels are present. Both sets only grow, so the iteration ends.

    Args:
        graph: The channel graph.
        values: Constant value of every atom, NaN for atoms that are not constant.
        round_to: Fill widths up to a multiple of this many channels.
        gathers: Whether layers may gather a part of their input.
    """

    def __init__(self, graph: ChannelGraph, values: FloatArray, round_to: int = 1, gathers: bool = True) -> None:
        self.graph, self.values, self.round_to, self.gathers = graph, values, round_to, gathers
        self.demanded: BoolArray = np.zeros(len(graph.classes), dtype=bool)
        self.demanded[graph.pinned] = True
        self.present: BoolArray = self.demanded.copy()
        self.kept_for_shape: list[str] = []
        """Modules that keep one unread channel."""
        self._needed = {layer.name: ~self.dispensable(layer) for layer in graph.layers}
        self._constant = {layer.name for layer in graph.layers if self._gives_constants(layer)}

    # --- queries -----------------------------------------------------------------------------------------------

    def is_present(self, atoms: IntArray) -> BoolArray:
        return self.present[self.graph.classes[atoms]]

    def is_demanded(self, atoms: IntArray) -> BoolArray:
        return self.demanded[self.graph.classes[atoms]]

    def selects(self, layer: LayerOp | NormOp) -> bool:
        """Return whether `layer` may gather a part of its input."""
        return self.gathers and layer.selectable

    def dispensable(self, layer: LayerOp) -> BoolArray:
        """Return the inputs that `layer` does not need: zeros, and constants that fold into its bias."""
        folds = layer.replaceable and not layer.padded and layer.groups == 1
        first = self.values[layer.inputs]
        dispensable = ~np.isnan(first) if folds else first == 0
        for use in layer.uses[1:]:
            dispensable &= self.values[use.inputs] == first
        return dispensable

    def read(self, layer: LayerOp) -> BoolArray:
        """Return the inputs that `layer` reads after the cut."""
        present = self.is_present(layer.inputs)
        return present & self._needed[layer.name] if self.selects(layer) else present

    def is_constant(self, layer: LayerOp) -> bool:
        """Return whether `layer` can be replaced by a constant: no output is demanded, or all are constant."""
        if not layer.replaceable:
            return False
        return layer.name in self._constant or not self.is_demanded(layer.outputs).any()

    def _gives_constants(self, layer: LayerOp) -> bool:
        first = self.values[layer.outputs]
        if np.isnan(first).any():
            return False
        return all(np.array_equal(self.values[use.outputs], first) for use in layer.uses[1:])

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
        size = -1
        while size != (size := int(np.count_nonzero(self.demanded) + np.count_nonzero(self.present))):
            for reader in reversed(self.graph.readers):
                self._propagate_to_inputs(reader)

    def _propagate_to_inputs(self, reader: Reader) -> None:
        """Propagate demanded and present channels from the outputs of a module to its inputs."""
        op, inputs, outputs = reader.op, reader.inputs, reader.outputs
        demanded = self.demanded[outputs]
        if isinstance(op, LayerOp):
            by_group = demanded.reshape(op.groups, -1).any(axis=1)
            constant = op.replaceable and (op.name in self._constant or not by_group.any())
            if not depthwise(op):
                if not constant:
                    self._read(inputs, self._needed[op.name] & np.repeat(by_group, len(inputs) // op.groups))
                return
            # The outputs of a group are removed together.
            outputs, demanded = outputs[:: len(outputs) // op.groups], by_group & self._needed[op.name] & (not constant)
        self.demanded[inputs[demanded]] = True
        self.present[inputs[self.present[outputs]]] = True
        if not (isinstance(op, SelectOp) or self.selects(op)):
            # Without a gather, every present input has an output, which is set to zero if it is masked.
            self.present[outputs[self.present[inputs]]] = True

    def _read(self, classes: IntArray, needed: BoolArray) -> None:
        """Demand the `needed` ones of `classes`; if there are none, keep one, since a layer must read a channel."""
        demanded = classes[needed]
        self.demanded[demanded] = self.present[demanded] = True
        if not len(demanded) and not self.present[classes].any():
            self.present[classes[0]] = True

    def _fill_equal_widths(self) -> bool:
        changed = False
        for widths in self.graph.equal_widths:
            counts = [int(self.is_present(piece).sum()) for piece in widths.pieces]
            for piece, count in zip(widths.pieces, counts, strict=True):
                changed |= self._add(self.graph.classes[piece], max(counts) - count)
        return changed

    def _fill_groups(self) -> bool:
        """Give all remaining groups of a grouped convolution the same number of inputs and of outputs."""
        changed = False
        for layer in self.graph.layers:
            if layer.groups == 1 or depthwise(layer) or self.is_constant(layer):
                continue
            rows = (layer.groups, -1)
            inputs, outputs = (self.graph.classes[atoms].reshape(rows) for atoms in (layer.inputs, layer.outputs))
            come, go = self.present[inputs].sum(axis=1), self.present[outputs].sum(axis=1)
            left = self.groups_left(layer)
            most_inputs = max([1, *self.read(layer).reshape(rows).sum(axis=1)[left].tolist()])
            most_outputs = max([0, *go[left].tolist()])
            for group in np.flatnonzero(left & ((come < most_inputs) | (go < most_outputs))):
                for classes, most in ((outputs[group], most_outputs), (inputs[group], most_inputs)):
                    changed |= self._add(classes, most - int(np.count_nonzero(self.present[classes])))
        return changed

    def groups_left(self, layer: LayerOp) -> BoolArray:
        """Return a mask of the groups of `layer` that are still computed."""
        left: BoolArray = np.any(self.is_present(layer.outputs).reshape(layer.groups, -1), axis=1)
        if not self.selects(layer):
            left |= np.any(self.is_present(layer.inputs).reshape(layer.groups, -1), axis=1)
        return left

    def _fill_multiples(self) -> bool:
        if self.round_to == 1:
            return False
        changed = False
        for layer in self.graph.layers:
            if not self.is_constant(layer) and (layer.groups == 1 or depthwise(layer)):
                changed |= self._fill_up(self.graph.classes[layer.outputs])
        for norm in self.graph.norms:
            # Other BatchNorms have the width of their input, and without demand any width will do.
            if self.selects(norm) and self.is_demanded(norm.outputs).any():
                changed |= self._fill_up(self.graph.classes[norm.outputs[self.is_present(norm.inputs)]])
        return changed

    def _fill_up(self, classes: IntArray) -> bool:
        """Make more of `classes` present, up to the next multiple."""
        return self._add(classes, -int(np.count_nonzero(self.present[classes])) % self.round_to)

    def _floor(self) -> bool:
        """Keep one channel of every module without any, since modules cannot be empty."""
        changed = False
        for reader in reversed(self.graph.readers):
            if not self.present[reader.outputs].any():
                # BatchNorms keep a channel that is present in their input; argmax is the first True, or 0.
                choice = 0 if isinstance(reader.op, LayerOp) else int(self.present[reader.inputs].argmax())
                self.present[reader.outputs[choice]] = True
                self.kept_for_shape.append(reader.op.name)
                self._propagate_to_inputs(reader)
                changed = True
        for op in self.graph.ops:
            if isinstance(op, ConstantOp) and not self.is_present(op.outputs).any():
                self.present[self.graph.classes[op.outputs[0]]] = True
                self.kept_for_shape.append(op.name)
                changed = True
        return changed

    def _add(self, classes: IntArray, count: int) -> bool:
        """Make up to `count` more of `classes` present."""
        absent = np.flatnonzero(~self.present[classes])[: max(count, 0)]
        self.present[classes[absent]] = True
        return len(absent) > 0


def depthwise(layer: LayerOp) -> bool:
    """Return whether each group of `layer` has a single input channel."""
    return layer.groups > 1 and layer.groups == len(layer.inputs)


# --- coupled and required sites ---------------------------------------------------------------------------------------

NONE = -1
MANY_GROUPS = 6
"""Whole groups of a grouped convolution are removed only if it has at least this many steps, each a number of groups
whose channels are a multiple of `round_to`. With fewer steps, a single step removes too much."""


def coupled_sites(graph: ChannelGraph) -> tuple[tuple[str, ...], ...]:
    """Return the groups of sites that are connected only by channelwise operators, such as a depthwise convolution.

    A channel is kept only if all sites of its group keep it. Groups are in order of execution, and the channels of
    their sites are in the same order.
    """
    return tuple(tuple(group) for group in _Couplings(graph).forward(graph.ops).groups.values())


def blocks_of_sites(graph: ChannelGraph, round_to: int = 1) -> dict[tuple[str, ...], int]:
    """Return the groups of sites that should be cut together, each with its block size in channels.

    These are coupled sites, and sites before and after a grouped convolution (ResNeXt, RegNet): removing a whole group
    removes its inputs and its outputs, while removing single channels saves hardly anything.
    """
    found = _Couplings(graph, round_to).forward(graph.ops)
    return {tuple(group): found.blocks[first] for first, group in found.groups.items()}


class _Couplings(ForwardAnalysis):
    """Computes for each atom the first and last site of its group, and its channel there."""

    def __init__(self, graph: ChannelGraph, round_to: int | None = None) -> None:
        self.round_to = round_to
        self.widths = {site.name: site.width for site in graph.sites}
        self.names = list(self.widths)
        self.site_of = graph.site_of
        self.first = np.full(len(graph.classes), NONE)
        self.last = np.full(len(graph.classes), NONE)
        self.channel = np.full(len(graph.classes), NONE)
        self.block = np.ones(len(graph.classes), dtype=np.int64)
        self.groups: dict[int, list[str]] = {}
        self.blocks: dict[int, int] = {}
        """Block size of each group of sites: channels are removed in blocks."""
        super().__init__(self.first, self.last, self.channel, self.block)

    def layer(self, op: LayerOp, use: Use) -> None:
        wide, width = len(use.inputs), len(use.inputs) // op.groups
        block = math.lcm(width, int(self.block[use.inputs].max(initial=1)))
        together = self.round_to and wide >= MANY_GROUPS * math.lcm(block, self.round_to)
        if wide == len(use.outputs) and (width == 1 or together):
            self.copy(use.inputs, use.outputs)
            self.block[use.outputs] = block

    def binary(self, op: BinaryOp) -> None:
        # The BatchNorms of a site have the same mask. With different sites of a group, either keeps the sum alive.
        if op.adds and all(bool((fact[op.left] == fact[op.right]).all()) for fact in self.facts):
            self.copy(op.left, op.outputs)

    def norm(self, op: NormOp, use: Use) -> None:
        site = self.site_of.get(op.name)
        if site is None:
            self.copy(use.inputs, use.outputs)
            return
        channels = np.arange(len(use.outputs))
        first = int(self.first[use.inputs[0]]) if len(use.inputs) else NONE
        coupled = (
            first != NONE
            and self.widths[self.names[first]] == len(channels)
            and bool((self.first[use.inputs] == first).all())
            and bool((self.channel[use.inputs] == channels).all())
        )
        block = int(self.block[use.inputs].max(initial=1))
        # The BatchNorms of a site always have the same mask, but a grouped convolution may be between them.
        alone = coupled and self.names[first] == site
        others = {name for key, group in self.groups.items() if key != first for name in group}
        if coupled and (block > 1 or not alone) and not {site, self.names[first]} & others:
            group = self.groups.setdefault(first, [self.names[first]])
            group += [site] if site not in group else []
            self.blocks[first] = math.lcm(self.blocks.get(first, 1), block)
        self.block[use.outputs] = block if coupled and not alone else 1
        self.last[use.outputs] = self.names.index(site)
        self.first[use.outputs] = first if coupled else self.last[use.outputs]
        self.channel[use.outputs] = channels


_required: WeakKeyDictionary[ChannelGraph, frozenset[str]] = WeakKeyDictionary()
"""Cache of :func:`required_sites`."""


def floor_masks(graph: ChannelGraph) -> dict[str, Tensor]:
    """Return masks that keep one channel of required sites and none of all others."""
    required = required_sites(graph)
    return {site.name: torch.arange(site.width) < int(site.name in required) for site in graph.sites}


def required_sites(graph: ChannelGraph) -> frozenset[str]:
    """Return the sites that must keep a channel, so that no output of the network becomes constant.

    These are the sites on every path to an output. If paths run in parallel and no site is on all of them, the sites of
    one path are added. The result is cached, since trial cuts, `inspect` and pruners use the same graph.
    """
    if graph not in _required:
        names = [site.name for site in graph.sites]
        every = frozenset(names)
        _required[graph] = _without_spare(graph, every, names, _live_outputs(graph, every))
    return _required[graph]


def _without_spare(graph: ChannelGraph, kept: frozenset[str], names: list[str], wanted: list[bool]) -> frozenset[str]:
    """Return `kept` without the sites in `names` that no output needs, in order, by bisection.

    If all of them may die, so may any part of them, so a single pass can decide many sites.
    """
    fewer = kept - set(names)
    if _live_outputs(graph, fewer) == wanted:
        return fewer
    if len(names) == 1:
        return kept
    half = len(names) // 2
    return _without_spare(graph, _without_spare(graph, kept, names[:half], wanted), names[half:], wanted)


def _live_outputs(graph: ChannelGraph, kept: Set[str]) -> list[bool]:
    """Return for each output of the network whether it depends on the inputs if only the sites in `kept` are alive."""
    dead = {norm for norm, site in graph.site_of.items() if site not in kept}
    found = Dependence(graph, dead).forward(graph.ops)
    return [bool(found.depends[atoms].any()) for atoms in graph.outputs]


class Dependence(ForwardAnalysis):
    """Computes which atoms depend on the inputs, and which are constant regardless of dead sites."""

    def __init__(self, graph: ChannelGraph, dead: Set[str]) -> None:
        self.dead = dead
        self.is_constant = np.zeros(len(graph.classes), dtype=bool)
        self.is_constant[PAD] = True
        for atoms in (*graph.constants, *(parameter.atoms for parameter in graph.free_parameters.values())):
            self.is_constant[atoms] = True  # independent of the inputs
        self.depends = ~self.is_constant
        super().__init__(self.depends, self.is_constant)

    def layer(self, op: LayerOp, use: Use) -> None:
        width = len(use.outputs) // op.groups
        self.depends[use.outputs] = np.repeat(self.depends[use.inputs].reshape(op.groups, -1).any(axis=1), width)
        constant = self.is_constant[use.inputs].reshape(op.groups, -1).all(axis=1)
        self.is_constant[use.outputs] = np.repeat(constant, width)

    def norm(self, op: NormOp, use: Use) -> None:
        self.copy(use.inputs, use.outputs)
        if op.name in self.dead:
            self.depends[use.outputs] = False

    def binary(self, op: BinaryOp) -> None:
        left, right = self.depends[op.left], self.depends[op.right]
        depends = left | right
        if op.absorbs_zero:  # a dead factor makes the product zero, but a constant factor does not
            depends &= (left | self.is_constant[op.left]) & (right | self.is_constant[op.right])
        self.depends[op.outputs] = depends
        self.is_constant[op.outputs] = self.is_constant[op.left] & self.is_constant[op.right]

    def constant(self, op: ConstantOp) -> None:
        self.depends[op.outputs], self.is_constant[op.outputs] = False, True

    def opaque(self, op: OpaqueOp) -> None:
        self.depends[op.outputs] = any(self.depends[atoms].any() for atoms in op.inputs)
        self.is_constant[op.outputs] = all(self.is_constant[atoms].all() for atoms in op.inputs)
