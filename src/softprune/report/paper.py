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

    @property
    def stand_in(self) -> str | None:
        """The recipe of the same row on Tiny-ImageNet, for ImageNet's."""
        name = self.recipe
        return name.replace("imagenet-", "tinyimagenet-", 1) if name.startswith("imagenet-") else None


@cache
def paper_table_rows() -> tuple[PaperFigures, ...]:
    """Every row of tables 1 to 8, in the paper's order. A run may be a row of several tables."""
    content = tomllib.loads((Path(__file__).parent / "paper.toml").read_text(encoding="utf-8"))
    return tuple(PaperFigures(**row) for row in content["row"])


@cache
def paper_figures() -> dict[str, PaperFigures]:
    """The rows by the name of the recipe that reproduces them; of several tables, the first."""
    return {row.recipe: row for row in reversed(paper_table_rows())}
