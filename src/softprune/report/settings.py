"""Nested settings as dotted keys, the way ``--set`` takes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """``{"train": {"epochs": 160}}`` as ``("train.epochs", 160)``."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
