"""Module names in groups: a network of 163 layers is read by its stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

MOST_GROUPS = 9


def stages(names: Sequence[str]) -> list[tuple[str, int]]:
    """(name, how many) for each run of neighbours that share a prefix.

    The prefix is as long as it can be while there are at most nine groups of neighbours; a network whose
    names have no such prefix is one group.
    """
    best = [("", len(names))]
    deepest = max((name.count(".") for name in names), default=0)
    for depth in range(1, deepest + 1):
        found = [
            (key, len(list(members)))
            for key, members in groupby(names, key=lambda name: _prefix(name, depth))
        ]
        if len(found) > MOST_GROUPS:
            break
        best = found
    return best


def _prefix(name: str, depth: int) -> str:
    return ".".join(name.split(".")[:depth])
