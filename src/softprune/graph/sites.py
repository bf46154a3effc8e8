"""Find the BatchNorms that can be masked, and those that share a mask.

A BatchNorm is a site on its own if all its readers are activations that map zero to zero. If the outputs of several
BatchNorms are added, a channel of the sum is zero only if it is zero in all of them. This gives three kinds of sites:

* ``sum``: BatchNorms that are added before an activation (RepVGG, projection shortcuts);
* ``linear``: a BatchNorm without a following activation (projections of MobileNetV2);
* ``stream``: all BatchNorms that write to a residual stream (post-activation ResNets).

A *point* is a set of BatchNorms whose sum is read by an activation, or by a layer without an activation.

A stream may *enter* a wider stream through a zero-padding shortcut ("option A"). Each has its own mask. A channel of
the wider stream is dead only if the channel that enters it is dead too.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node
from torch.nn.modules.batchnorm import _BatchNorm

from softprune.graph.builder import GraphBuilder, operator_name
from softprune.graph.channels import (
    PAD,
    BinaryOp,
    ChannelSets,
    ChannelwiseOp,
    ConstantOp,
    Entering,
    ForwardAnalysis,
    Frozen,
    IntArray,
    LayerOp,
    NormOp,
    OpaqueOp,
    Site,
    Use,
)
from softprune.graph.modules import is_known_batch_norm
from softprune.graph.operators import OPERATORS, activations, pointwise

WRITTEN_OUT = tuple(name for name, activation in activations().items() if activation.left_tail_dies)
"""Activations that forward() may implement by arithmetic, such as x * sigmoid(x)."""
LARGEST_FORMULA = 12
"""Maximum number of operators in such an activation (GELU in its tanh form has nine)."""
NOTHING = -1
"""Marks atoms that are not written by a BatchNorm: inputs, outputs of layers, parameters."""
ZERO = -2
"""Marks zero padding along the channels, and constants."""
NO_ACTIVATION = "none"
Point = frozenset[int]
Entries = dict[tuple[int, int], None]
"""Ordered set of (root BatchNorm of a narrower stream, first channel)."""


# --- sites of one BatchNorm -----------------------------------------------------------------------------------------


def find_sites(builder: GraphBuilder) -> tuple[tuple[Site, ...], tuple[Frozen, ...]]:
    """Return all BatchNorms of the model, in its order, as sites or as frozen ones with their reasons."""
    sites: list[Site] = []
    frozen: list[Frozen] = []
    for name, module in builder.model.named_modules():
        known = is_known_batch_norm(type(module))
        if not known and not isinstance(module, _BatchNorm) and not _named_batch_norm(module):
            continue
        width = int(getattr(module, "num_features", 0))
        unusable = _unusable_because(builder, name, module, known)
        uncuttable = None if unusable else builder.table.pinned_because(builder.called[name].outputs)
        activation, reason = (None, unusable) if unusable else _activation_after_each(builder.norm_nodes[name])
        if activation is not None and uncuttable is None:
            sites.append(Site(name, width, activation))
        else:
            maskable = unusable is None and uncuttable is None
            frozen.append(Frozen(name, width, reason or f"its channels cannot be cut: {uncuttable}", maskable))
    return tuple(sites), tuple(frozen)


def _named_batch_norm(module: nn.Module) -> bool:
    """Return whether a module of an unknown class is a BatchNorm by its name, and not a wrapper around one."""
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return "BatchNorm" in type(module).__name__ and (bool(own) or next(module.children(), None) is None)


def _unusable_because(builder: GraphBuilder, name: str, module: nn.Module, known: bool) -> str | None:
    """Return why the module cannot be masked; None if it can."""
    if not known:
        return (
            f"{type(module).__name__} is not a BatchNorm class that softprune knows; use one of torch.nn, which can "
            "load the weights of a FrozenBatchNorm2d"
        )
    if name not in builder.called:
        return "the forward pass does not call the module, so a mask would have no effect"
    if getattr(module, "weight", None) is None or getattr(module, "bias", None) is None:
        return "it has no learned scale and shift (affine=False)"
    if not all(parameter.requires_grad for parameter in module.parameters(recurse=False)):
        return "its scale or shift is not trained (requires_grad=False)"
    if not getattr(module, "track_running_stats", True):
        return "it has no running statistics, so its output in evaluation depends on the batch"
    return None


def _activation_after_each(nodes: Sequence[Node]) -> tuple[str | None, str]:
    """Return (activation, "") if the same activation reads all calls of a BatchNorm, otherwise (None, the reason)."""
    found = {_activation_after(node) for node in nodes}
    refused = sorted(reason for activation, reason in found if activation is None)
    if refused or len(found) > 1:
        return None, refused[0] if refused else "different activations read it in different calls"
    return found.pop()


def _activation_after(node: Node) -> tuple[str | None, str]:
    """Return (activation, "") if every reader of `node` is the same activation, otherwise (None, the reason)."""
    found: set[str] = set()
    queue: list[tuple[Node, Node]] = [(node, reader) for reader in node.users]
    seen: set[Node] = set()
    while queue:
        source, reader = queue.pop()
        if reader in seen:
            continue
        seen.add(reader)
        name = operator_name(reader) if reader.op == "call_function" else reader.op
        activation = OPERATORS[name].activation_of(reader) if name in OPERATORS else None
        if activation is not None:
            found.add(activation)
        elif name in OPERATORS and OPERATORS[name].transparent:
            queue.extend((reader, further) for further in reader.users)
        else:
            formula = _written_out(source)
            if formula is None:
                return None, _refusal(name, reader)
            found.add(formula)
            seen.update(source.users)
    if not found:
        return None, "nothing reads it"
    if len(found) > 1:
        return None, f"different activations read it ({', '.join(sorted(found))})"
    return found.pop(), ""


def _refusal(name: str, reader: Node) -> str:
    if reader.op == "output":
        return "it is an output of the model"
    if name in OPERATORS and OPERATORS[name].rule is pointwise and OPERATORS[name].at_zero:
        return f"{name} reads it, and {name}(0) = {OPERATORS[name].at_zero}: a dropped channel would not be dead"
    return f"{name} reads it without an activation in between"


def _written_out(source: Node) -> str | None:
    """Return the activation that the arithmetic after `source` implements, identified by its values."""
    points = torch.linspace(-8.0, 8.0, 321, dtype=torch.float64)
    values: dict[Node, Any] = {source: points}
    node = source
    while (node := node.next).op != "root":
        if not any(argument in values for argument in node.all_input_nodes):
            continue
        if node.op != "call_function" or not all(argument in values for argument in node.all_input_nodes):
            return None
        try:
            values[node] = node.target(*_filled(node.args, values), **_filled(node.kwargs, values))  # type: ignore[operator]
        except (RuntimeError, IndexError):  # the operator needs more dimensions
            return None
        if not isinstance(values[node], Tensor) or values[node].shape != points.shape:
            return None
        inner = set(values) - {node}
        if all(user in values for member in inner for user in member.users):
            equal = (n for n in WRITTEN_OUT if torch.allclose(values[node], getattr(F, n)(points), atol=1e-3, rtol=0))
            name = next(equal, None)
            if name is not None:
                return name
        if len(values) > LARGEST_FORMULA:
            return None
    return None


def _filled(arguments: Any, values: dict[Node, Any]) -> Any:
    """Replace nodes in `arguments` by copies of their values, since operators may write in place."""
    return torch.fx.node.map_arg(arguments, lambda node: values[node].clone())


# --- sites of several BatchNorms -------------------------------------------------------------------------------------


def find_groups(builder: GraphBuilder, sites: Sequence[Site], frozen: Sequence[Frozen]) -> tuple[Site, ...]:
    """Return the sites of kind sum, linear and stream.

    A BatchNorm may be in a sum and in a stream; :meth:`ChannelGraph.with_kinds` prefers streams.
    """
    single = {site.name for site in sites}
    usable = single | {norm.name for norm in frozen if norm.maskable}
    widths = {
        norm.name: len(norm.outputs) for norm in builder.graph.norms if norm.name in usable and len(norm.uses) == 1
    }
    names = tuple(widths)
    sums = _Sums(len(builder.table), widths).forward(builder.graph.ops)
    members: dict[int, list[int]] = {}
    for number in range(len(names)):
        members.setdefault(sums.stream_of(number), []).append(number)

    def site(kind: str, points: Sequence[Point], activation: str, entering: Entering = ()) -> Site:
        named = _named(points, names)
        return Site(named[0][0], widths[named[0][0]], activation, named, kind, entering)

    groups = [
        site("sum", [point], activations.pop()) for point, activations in sums.pure_points().items() if len(point) > 1
    ]
    broken = {sums.stream_of(number) for number in sums.broken}
    found = {root: sums.points_of(numbers) for root, numbers in members.items()}
    for root, numbers in members.items():
        sources = tuple(sums.entering(root))
        if all(names[number] in single for number in numbers) or not broken.isdisjoint([root, *dict(sources)]):
            continue
        points, activation = found[root]
        if any(found[source][1] != activation for source, _ in sources):
            activation = NO_ACTIVATION
        if len(numbers) > 1 and len(points) == 1 and activation != NO_ACTIVATION and not sources:
            continue  # a sum, which is not added to anything later
        kind = "linear" if len(numbers) == 1 and not sources else "stream"
        entering = tuple((offset, _named(found[source][0], names)) for source, offset in sources)
        groups.append(site(kind, points, activation, entering))
    return tuple(groups)


def _named(points: Sequence[Point], names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(names[number] for number in sorted(point)) for point in points)


class _Sums(ForwardAnalysis):
    """Computes for each atom its stream, its channel there, and the BatchNorms added since the last activation."""

    def __init__(self, atoms: int, widths: Mapping[str, int]) -> None:
        self._numbers = {name: number for number, name in enumerate(widths)}
        self._widths = np.array(list(widths.values()), dtype=np.int64)
        self._streams = ChannelSets()
        self._streams.fresh(len(widths))  # after the class of padding
        self._sets: list[Point] = [frozenset()]
        self._ids: dict[Point, int] = {frozenset(): 0}
        self._read: dict[Point, tuple[set[str], bool]] = {}
        """Maps points to (activations that read it, whether nothing else was added), in order of execution."""
        self.broken: set[int] = set()
        """BatchNorms of streams to which something is added that no mask sets to zero, or with other channels."""
        self._entries: set[tuple[int, int, int]] = set()
        """(BatchNorm of a stream, BatchNorm of a narrower stream that enters it, first channel)."""
        self.writer: IntArray = np.full(atoms, NOTHING, dtype=np.int64)
        self.place: IntArray = np.full(atoms, NOTHING, dtype=np.int64)
        self.point: IntArray = np.zeros(atoms, dtype=np.int64)
        self.pure = np.zeros(atoms, dtype=bool)
        self.writer[PAD] = ZERO
        super().__init__(self.writer, self.place, self.point, self.pure)

    # --- results -----------------------------------------------------------------------------------------------

    def stream_of(self, number: int) -> int:
        """Return the first BatchNorm of the stream that BatchNorm `number` writes to."""
        return int(self._streams.find(np.array([number + 1]))[0]) - 1

    def entering(self, root: int, offset: int = 0, found: Entries | None = None) -> Entries:
        """Return the narrower streams that enter the stream `root`, each with the position of its first channel."""
        found = {} if found is None else found
        for wide, narrow, first in sorted(self._entries):
            place = self.stream_of(narrow), offset + first
            if self.stream_of(wide) == root and place not in found:  # there may be several paths to it
                found[place] = None
                self.entering(*place, found)
        return found

    def pure_points(self) -> dict[Point, set[str]]:
        """Return the points whose BatchNorms are read by a single activation only, with this activation."""
        return {
            point: set(activations)
            for point, (activations, pure) in self._read.items()
            if pure
            and len(activations) == 1
            and NO_ACTIVATION not in activations
            and all(other == point or other.isdisjoint(point) for other in self._read)
        }

    def points_of(self, numbers: Collection[int]) -> tuple[list[Point], str]:
        """Return the points of a stream, each without the BatchNorms of earlier points, and the common activation."""
        points: list[Point] = []
        activations: set[str] = set()
        seen: set[int] = set()
        for point, (read_by, _) in self._read.items():
            if not point.isdisjoint(numbers):
                activations |= read_by
                # If a channel is dead at the earlier points, only the new BatchNorms matter at this one.
                new = point - seen
                points += [new] if new else []
                seen |= point
        unread = frozenset(numbers) - seen
        points += [unread] if unread else []
        return points, activations.pop() if len(activations) == 1 else NO_ACTIVATION

    # --- operators ---------------------------------------------------------------------------------------------

    def norm(self, op: NormOp, use: Use) -> None:
        self._note(use.inputs, NO_ACTIVATION)
        number = self._numbers.get(op.name)
        if number is not None:
            self.writer[use.outputs] = number
            self.place[use.outputs] = np.arange(len(use.outputs))
            self.point[use.outputs] = self._id(frozenset([number]))
            self.pure[use.outputs] = True

    def layer(self, op: LayerOp, use: Use) -> None:
        self._note(use.inputs, NO_ACTIVATION)

    def channelwise(self, op: ChannelwiseOp) -> None:
        inputs, outputs = op.inputs.ravel(), op.outputs.ravel()
        if op.activation is not None:
            self._note(inputs, op.activation)
        elif op.at_zero != 0:
            self._note(inputs, NO_ACTIVATION)
            return
        self.copy(inputs, outputs)
        if op.activation is not None:
            self.point[outputs], self.pure[outputs] = 0, False

    def binary(self, op: BinaryOp) -> None:
        if op.adds:
            self._add(op)
            return
        left, right = self.writer[op.left], self.writer[op.right]
        if op.absorbs_zero and bool((right == NOTHING).all()):
            self.copy(op.left, op.outputs)
        elif op.absorbs_zero and bool((left == NOTHING).all()):
            self.copy(op.right, op.outputs)
        else:
            self._note(op.left, NO_ACTIVATION)
            self._note(op.right, NO_ACTIVATION)

    def constant(self, op: ConstantOp) -> None:
        self.writer[op.outputs] = ZERO  # of a removed branch, which does not affect the stream

    def opaque(self, op: OpaqueOp) -> None:
        for atoms in op.inputs:
            self._note(atoms, NO_ACTIVATION)

    def _add(self, op: BinaryOp) -> None:
        for stream, padded in ((op.left, op.right), (op.right, op.left)):
            if self._enters(padded, stream):
                self.copy(stream, op.outputs)
                self.pure[op.outputs[self.writer[padded] != ZERO]] = False
                return
        left, right = self.writer[op.left], self.writer[op.right]
        written = bool((left >= 0).all() and (right >= 0).all())
        aligned = (self.place[op.left] == self.place[op.right]).all()
        # A mask applies to a whole BatchNorm, so a narrower one that is added to a slice cannot share it.
        if not (written and aligned and (self._widths[left] == self._widths[right]).all()):
            for atoms in (op.left, op.right):
                self._note(atoms, NO_ACTIVATION)
                known = np.unique(self.writer[atoms])
                self.broken |= {int(number) for number in known if number >= 0}
            return
        self._streams.union(*np.unique(np.stack([left, right]), axis=1) + 1)
        self.copy(op.left, op.outputs)
        self.pure[op.outputs] = self.pure[op.left] & self.pure[op.right]
        pairs, where = np.unique(np.stack([self.point[op.left], self.point[op.right]]), axis=1, return_inverse=True)
        united = [self._id(self._sets[one] | self._sets[other]) for one, other in pairs.T.tolist()]
        self.point[op.outputs] = np.array(united)[where.ravel()]

    def _enters(self, padded: IntArray, stream: IntArray) -> bool:
        """Return whether `padded` consists of zeros or of a whole narrower stream between zeros."""
        inner = np.flatnonzero(self.writer[padded] != ZERO)
        if not len(inner):
            return True
        narrow, wide = int(self.writer[padded[inner[0]]]), int(self.writer[stream[0]])
        if len(inner) == len(padded) or min(narrow, wide) < 0:
            return False
        first = int(inner[0])
        if not (self._is_all_of(narrow, padded[first : inner[-1] + 1]) and self._is_all_of(wide, stream)):
            return False
        self._note(padded[inner], NO_ACTIVATION)
        self._entries.add((wide, narrow, first))
        return True

    def _is_all_of(self, number: int, atoms: IntArray) -> bool:
        """Return whether `atoms` are all channels of BatchNorm `number`, in order."""
        in_order = np.array_equal(self.place[atoms], np.arange(self._widths[number]))
        return in_order and bool((self.writer[atoms] == number).all())

    # --- internal ----------------------------------------------------------------------------------------------

    def _id(self, point: Point) -> int:
        if point not in self._ids:
            self._ids[point] = len(self._sets)
            self._sets.append(point)
        return self._ids[point]

    def _note(self, atoms: IntArray, activation: str) -> None:
        """Record that an activation, or a layer (NO_ACTIVATION), reads these atoms."""
        atoms = atoms.ravel()
        for number in np.unique(self.point[atoms[self.writer[atoms] >= 0]]).tolist():
            if number:
                here = self.point[atoms] == number
                read_by, pure = self._read.setdefault(self._sets[number], (set(), True))
                read_by.add(activation)
                self._read[self._sets[number]] = read_by, pure and bool(self.pure[atoms][here].all())
