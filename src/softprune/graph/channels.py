"""Channels as atoms: which entries of which tensors are one and the same channel, or must be cut together.

Every tensor of the graph carries an integer array that broadcasts to its shape: entry -> atom. A (N, C, H, W)
feature map has an array of shape (1, C, 1, 1); after a flatten, (1, C*H*W) with each atom repeated. Operators that
only move data (view, permute, cat, chunk, shuffle...) are *run on these arrays*, so no rule has to guess what they
do. Two atoms in one class are kept or cut together; a pinned class is always kept.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

PAD = 0
"""The atom of channels that constant padding adds: exactly zero, and bound to the forward's Python constant."""


class ChannelSets:
    """A growing union-find over atoms; a class may be pinned (always kept), with the reason in words."""

    def __init__(self) -> None:
        self._parent: IntArray = np.zeros(1024, dtype=np.int64)
        self._size = 1
        self._reasons: dict[int, str] = {PAD: "channel padding in forward() fixes their number"}

    def __len__(self) -> int:
        return self._size

    def fresh(self, count: int) -> IntArray:
        """Return `count` new atoms, each a class of its own."""
        atoms = self._grow(count)
        self._parent[atoms] = atoms
        return atoms

    def follow(self, atoms: IntArray) -> IntArray:
        """Return new atoms in an array of the same shape, each in the class of its counterpart in `atoms`."""
        new = self._grow(atoms.size)
        self._parent[new] = self.find(atoms.ravel())
        return new.reshape(atoms.shape)

    def find(self, atoms: IntArray) -> IntArray:
        """Return the classes of `atoms`."""
        roots = self._parent[atoms]
        while not np.array_equal(above := self._parent[roots], roots):
            self._parent[atoms] = roots = above
        return roots

    def union(self, left: IntArray, right: IntArray) -> None:
        """Join the classes of `left` and `right`, entry by entry (the arrays broadcast)."""
        left, right = (each.ravel() for each in np.broadcast_arrays(left, right))
        while True:
            left, right = self.find(left), self.find(right)
            apart = left != right
            if not apart.any():
                return
            left, right = left[apart], right[apart]
            low, high = np.minimum(left, right), np.maximum(left, right)
            np.minimum.at(self._parent, high, low)  # a class that meets several joins the lowest; the rest follow
            for root in np.unique(high)[::-1].tolist():  # a lower one passes on what it has got from a higher one
                if root in self._reasons:
                    self._reasons.setdefault(int(self._parent[root]), self._reasons.pop(root))

    def pin(self, atoms: IntArray, reason: str) -> None:
        """Keep the classes of `atoms` for ever, because of `reason` (the first one given stays)."""
        for root in np.unique(self.find(atoms.ravel())).tolist():
            self._reasons.setdefault(root, reason)

    def pinned_because(self, atoms: IntArray) -> str | None:
        """Return why all classes of `atoms` are pinned, by the first of them; None where one is not."""
        roots = self.find(atoms).tolist()
        return self._reasons[roots[0]] if all(root in self._reasons for root in roots) else None

    def reasons(self, atoms: IntArray) -> set[str]:
        """Return why classes of `atoms` are pinned, of those that are."""
        return {self._reasons[root] for root in np.unique(self.find(atoms)).tolist() if root in self._reasons}

    def pinned(self) -> IntArray:
        """Return the classes that are always kept."""
        return np.array(sorted(self._reasons), dtype=np.int64)

    def classes(self) -> IntArray:
        """Return the class of every atom."""
        return self.find(np.arange(self._size, dtype=np.int64))

    def _grow(self, count: int) -> IntArray:
        start, self._size = self._size, self._size + count
        if self._size > len(self._parent):
            grown = np.zeros(2 * self._size, dtype=np.int64)
            grown[:start] = self._parent[:start]
            self._parent = grown
        return np.arange(start, self._size, dtype=np.int64)


def collapse(array: NDArray[Any]) -> NDArray[Any]:
    """Return `array` with every dimension along which it does not vary reduced to size 1."""
    # Repeated memory first: a tensor that was expanded is small.
    array = array[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in array.strides)]
    for dim in range(array.ndim):
        if array.shape[dim] > 1:
            head = array.take([0], axis=dim)
            if (array.take([1], axis=dim) == head).all() and (array == head).all():
                array = head
    return np.asarray(array, order="C")  # np.ascontiguousarray would give a single number a dimension
