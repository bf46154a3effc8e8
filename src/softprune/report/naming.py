"""Names as readers know them: networks and data sets as papers write them, 163 modules by their stages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

FAMILIES = {"vgg": "VGG", "resnet": "ResNet", "densenet": "DenseNet", "cifar": "CIFAR"}
MOST_GROUPS = 9


def known_as(key: str) -> str:
    """A network or data set as papers write it: ``resnet164`` as ResNet-164; others stay as they are."""
    match = re.fullmatch(r"(vgg|resnet|densenet|cifar)_?(\d+)", key)
    return f"{FAMILIES[match[1]]}-{match[2]}" if match else key


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
