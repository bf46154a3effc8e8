"""docs/budgets.md has a row for every quantity that a target can name. benchmarks/render.py writes its tables."""

import re
from pathlib import Path

from softprune.target import QUANTITIES

ROOT = Path(__file__).parents[2]


def test_every_quantity_has_a_row() -> None:
    page = ROOT / "docs" / "budgets.md"
    rows = page.read_text(encoding="utf-8").partition("## Targets")[2].partition("The amount")[0]
    assert re.findall(r"^\| `(\w+)`", rows, re.MULTILINE) == [*QUANTITIES]
