"""All methods by name: one line each, read by recipes, CLI, tests, docs and reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from softprune.methods.base import Pruner
from softprune.methods.scp import SoftPruner


@dataclass(frozen=True)
class Method:
    """A pruning method: how to build its pruner, and what it is in a line."""

    build: Callable[..., Pruner]
    description: str
    paper: str


REGISTRY: dict[str, Method] = {
    "scp": Method(
        SoftPruner,
        "soft channel pruning: masks from BatchNorm shift and scale, learned with the weights",
        "Kang and Han, ICML 2020",
    ),
}
