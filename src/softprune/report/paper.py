"""The figures of the SCP paper, from paper.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class PaperFigures:
    """A row of a table of the paper. None where the table has no such figure."""

    recipe: str
    table: int
    baseline: float | None = None
    top1: float | None = None
    drop: float | None = None
    channels: float | None = None
    params: float | None = None
    flops: float | None = None


@cache
def paper_figures() -> dict[str, PaperFigures]:
    """All rows by the name of the recipe that reproduces them."""
    content = tomllib.loads((Path(__file__).parent / "paper.toml").read_text(encoding="utf-8"))
    return {row["recipe"]: PaperFigures(**row) for row in content["row"]}
