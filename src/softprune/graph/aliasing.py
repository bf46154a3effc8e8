"""Which tensors of a captured graph share memory, so that writing into one changes what another holds.

torch.export follows `x += y` and `relu(x, inplace=True)` by itself: whoever reads `x` later reads the result. It does
not follow writes through views: after ``x[:, :4] = 0`` later readers of `x` still point at the node before the write.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch.fx import Node


class Aliases:
    """Groups of nodes that share memory, and who is read after a write."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._order = {node: number for number, node in enumerate(nodes)}
        self._group: dict[Node, set[Node]] = {}
        for node in nodes:
            shared = _shares_with(node)
            if shared is not None:
                group = self._group.setdefault(shared, {shared})
                group.add(node)
                self._group[node] = group

    def changed_by(self, node: Node) -> list[Node]:
        """The tensors that `node`, just run, has changed behind their back, and that are read again."""
        written = _written(node)
        if written is None or written not in self._group:
            return []
        here = self._order[node]
        return [
            other
            for other in self._group[written]
            if other is not node
            and self._order[other] < here
            and any(self._order[user] > here for user in other.users)
        ]


def _shares_with(node: Node) -> Node | None:
    """The argument whose memory `node` shares, by its operator's schema."""
    if node.op != "call_function":
        return None
    first = node.args[0] if node.args else None
    if node.target is operator.getitem:
        return first if isinstance(first, Node) else None
    schema = getattr(node.target, "_schema", None)
    if schema is None or not isinstance(first, Node):
        return None
    aliased = any(result.alias_info is not None for result in schema.returns)
    return first if aliased else None


def _written(node: Node) -> Node | None:
    """The argument that `node` writes into."""
    schema = getattr(node.target, "_schema", None) if node.op == "call_function" else None
    for position, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.alias_info is not None and argument.alias_info.is_write and position < len(node.args):
            written = node.args[position]
            return written if isinstance(written, Node) else None
    return None
