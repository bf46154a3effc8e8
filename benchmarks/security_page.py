"""Render the tables of docs/security.md from the records of `make fuzz` and `make kill`.

python benchmarks/security_page.py
"""

import json
from pathlib import Path
from typing import Any

from marks import replace_tables

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "security.md"
_OUTCOMES = ("same", "accepted", "refused")


def page(text: str) -> str:
    """Return the page with the tables of the records that exist."""

    def render(name: str) -> str | None:
        path = HERE / "records" / f"{name}.json"
        table = {"fuzz": fuzz_table, "kill": kill_table}[name]
        return f"\n{table(json.loads(path.read_text()))}" if path.is_file() else None

    return replace_tables(text, render)


def fuzz_table(record: dict[str, Any]) -> str:
    """Return the inputs by format and outcome, in Markdown."""
    lines = [
        f"Last record: {record['inputs']:,} inputs with seed {record['seed']}, {record['findings']} findings. The "
        f"longest that ended took {record['longest_seconds']:.1f} s of processor time, the largest "
        f"{record['largest_megabytes']:.0f} MB.",
        "",
        "| format | inputs | undamaged result | other valid result | refused | findings |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, counts in record["formats"].items():
        whole = sum(counts.values())
        good = [counts.get(outcome, 0) for outcome in _OUTCOMES]
        cells = [name, *(f"{number:,}" for number in (whole, *good, whole - sum(good)))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def kill_table(record: dict[str, Any]) -> str:
    """Return the kills by action, in Markdown."""
    lines = [
        f"Last record: {record['kills']} kills with seed {record['seed']}, {record['findings']} findings.",
        "",
        "| action | kills | at a file operation | half-written files | comparisons | findings |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, row in record["actions"].items():
        random = sum(count for point, count in row["points"].items() if point.startswith("random time"))
        cells = [
            name,
            *(
                str(number)
                for number in (
                    row["kills"],
                    row["kills"] - random,
                    row["half_written"],
                    row["compared"],
                    len(row["findings"]),
                )
            ),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
