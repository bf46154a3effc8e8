"""BatchNorms that share one mask per channel, found by following their outputs through sums.

Where the outputs of BatchNorms are added, a channel of the sum is zero only if it is zero in every one of them. Three
kinds of sites follow from this, beside the BatchNorm that an activation reads directly:

* ``sum``: the BatchNorms of one sum that an activation reads (RepVGG, projection shortcuts);
* ``linear``: a BatchNorm that no activation follows (projections of MobileNetV2);
* ``stream``: all BatchNorms that write one residual stream (post-activation ResNets).

A *point* is a set of BatchNorms that are added up before one activation, or before one layer that reads them without.

A stream may *enter* a wider one through a shortcut that pads zero channels ("option A"). Each has its own mask. A
channel of the wider stream is dead only if the channel that enters there is dead as well.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch

from softprune.graph.channels import PAD, IntArray
from softprune.graph.dataflow import ForwardAnalysis
from softprune.graph.ops import BinaryOp, ChannelwiseOp, Entering, LayerOp, NormOp, Op, OpaqueOp, Site, Use

NOTHING = -1
"""No BatchNorm: an input, the output of a layer, a parameter."""
ZERO = -2
"""Padding with zeros along the channels."""
NO_ACTIVATION = "none"

Point = frozenset[int]
Entries = dict[tuple[int, int], None]
"""Narrower streams, each with that channel; in order, once each."""


def find_groups(ops: Sequence[Op], atoms: int, widths: Mapping[str, int], single: Collection[str]) -> tuple[Site, ...]:
    """Return the sums, linear BatchNorms and streams of a network.

    A BatchNorm may be in a sum and in a stream; whoever enables both kinds gives streams precedence.

    Args:
        ops: The operators in order of execution.
        atoms: Number of atoms.
        widths: Width of every BatchNorm that could carry a mask, in order of execution.
        single: Those that are sites by themselves, since an activation reads them directly.
    """
    names = tuple(widths)
    sums = _Sums(atoms, widths)
    sums.forward(ops)
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
            continue  # a sum that is not added to anything later
        kind = "linear" if len(numbers) == 1 and not sources else "stream"
        entering = tuple((offset, _named(found[source][0], names)) for source, offset in sources)
        groups.append(site(kind, points, activation, entering))
    return tuple(groups)


def _named(points: Sequence[Point], names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(names[number] for number in sorted(point)) for point in points)


class _Sums(ForwardAnalysis):
    """For every atom, the stream that it belongs to, its channel there, and what was added since an activation."""

    def __init__(self, atoms: int, widths: Mapping[str, int]) -> None:
        self._numbers = {name: number for number, name in enumerate(widths)}
        self._widths = np.array(list(widths.values()), dtype=np.int64)
        self._parent = list(range(len(widths)))
        self._sets: list[Point] = [frozenset()]
        self._ids: dict[Point, int] = {frozenset(): 0}
        self._read: dict[Point, tuple[set[str], bool]] = {}
        """Point -> activations that read it, and whether nothing else was added; in order of execution."""
        self.broken: set[int] = set()
        """BatchNorms to whose stream something is added that no mask makes zero, or at other channels."""
        self._entries: set[tuple[int, int, int]] = set()
        """BatchNorm of a stream, BatchNorm of a narrower stream that is padded and added to it, first channel."""
        self.writer: IntArray = np.full(atoms, NOTHING, dtype=np.int64)
        self.place: IntArray = np.full(atoms, NOTHING, dtype=np.int64)
        self.point: IntArray = np.zeros(atoms, dtype=np.int64)
        self.pure = np.zeros(atoms, dtype=bool)
        self.writer[PAD] = ZERO
        super().__init__(self.writer, self.place, self.point, self.pure)

    # --- what was found ----------------------------------------------------------------------------------------

    def stream_of(self, number: int) -> int:
        """Return the first BatchNorm of the stream that BatchNorm `number` writes."""
        while self._parent[number] != number:
            number = self._parent[number]
        return number

    def entering(self, root: int, offset: int = 0, found: Entries | None = None) -> Entries:
        """Return the narrower streams whose channels are in the stream `root`, and where their first channels are."""
        found = {} if found is None else found
        for wide, narrow, first in sorted(self._entries):
            place = self.stream_of(narrow), offset + first
            if self.stream_of(wide) == root and place not in found:  # there may be many paths to it
                found[place] = None
                self.entering(*place, found)
        return found

    def pure_points(self) -> dict[Point, set[str]]:
        """Return the points that one activation reads, of BatchNorms that nothing else reads -> the activation."""
        return {
            point: set(activations)
            for point, (activations, pure) in self._read.items()
            if pure
            and len(activations) == 1
            and NO_ACTIVATION not in activations
            and all(other == point or other.isdisjoint(point) for other in self._read)
        }

    def points_of(self, numbers: Collection[int]) -> tuple[list[Point], str]:
        """Return the points of a stream, each without the BatchNorms of earlier ones, and the common activation."""
        points: list[Point] = []
        activations: set[str] = set()
        seen: set[int] = set()
        for point, (read_by, _) in self._read.items():
            if not point.isdisjoint(numbers):
                activations |= read_by
                # Dead at the earlier points, a channel sees its own BatchNorm alone at this one.
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
        elif not _keeps_zero(op):
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
        # One mask covers all of a BatchNorm: a narrower one, added to a slice of channels, cannot share it.
        if not (written and aligned and (self._widths[left] == self._widths[right]).all()):
            for atoms in (op.left, op.right):
                self._note(atoms, NO_ACTIVATION)
                known = np.unique(self.writer[atoms])
                self.broken |= {int(number) for number in known if number >= 0}
            return
        for one, other in np.unique(np.stack([left, right]), axis=1).T.tolist():
            self._join(one, other)
        self.copy(op.left, op.outputs)
        self.pure[op.outputs] = self.pure[op.left] & self.pure[op.right]
        pairs, where = np.unique(np.stack([self.point[op.left], self.point[op.right]]), axis=1, return_inverse=True)
        united = [self._id(self._sets[one] | self._sets[other]) for one, other in pairs.T.tolist()]
        self.point[op.outputs] = np.array(united)[where.ravel()]

    def _enters(self, padded: IntArray, stream: IntArray) -> bool:
        """Return whether `padded` adds to `stream` nothing but zeros and, between them, all of a narrower stream."""
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
        """Return whether `atoms` are all channels that BatchNorm `number` writes, in order."""
        in_order = np.array_equal(self.place[atoms], np.arange(self._widths[number]))
        return in_order and bool((self.writer[atoms] == number).all())

    # --- inside ------------------------------------------------------------------------------------------------

    def _id(self, point: Point) -> int:
        if point not in self._ids:
            self._ids[point] = len(self._sets)
            self._sets.append(point)
        return self._ids[point]

    def _join(self, one: int, other: int) -> None:
        low, high = sorted((self.stream_of(one), self.stream_of(other)))
        if low != high:
            self._parent[high] = low

    def _note(self, atoms: IntArray, activation: str) -> None:
        """An activation, or a layer without one, reads these atoms."""
        atoms = atoms.ravel()
        for number in np.unique(self.point[atoms[self.writer[atoms] >= 0]]).tolist():
            if number:
                here = self.point[atoms] == number
                read_by, pure = self._read.setdefault(self._sets[number], (set(), True))
                read_by.add(activation)
                self._read[self._sets[number]] = read_by, pure and bool(self.pure[atoms][here].all())


def _keeps_zero(op: ChannelwiseOp) -> bool:
    if op.evaluate is None:
        return op.keeps_zero
    return bool((op.evaluate(torch.zeros(1, dtype=torch.float64)) == 0).all())
