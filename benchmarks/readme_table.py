"""The README's table from our records: SCP on the paper's networks, beside the dense network and the paper.

    python benchmarks/readme_table.py

Writes it into README.md, between its marks.
"""

from pathlib import Path

from marks import replace_tables

from softprune.lab.config.method import TITLES
from softprune.lab.report import load_run, paper_rows
from softprune.lab.report.grouping import Spread

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


def table(results: Path = ROOT / "results") -> str:
    """The rows of SCP itself, in Markdown."""
    lines = [
        "| table | data | network | seeds | dense | pruned | best epoch | paper | FLOPs cut | paper "
        "| parameters cut | paper |",
        "|---:|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    runs = [load_run(path.parent) for path in sorted(results.glob("cifar*/result.json"))]
    ours = [row for row in paper_rows(runs) if row.method == TITLES["scp"]]
    found = [(row, row.paper) for row in ours if row.paper and not row.apart]
    for row, theirs in sorted(
        found, key=lambda pair: (pair[1].table, pair[0].data, pair[0].model, pair[1].flops or 0.0)
    ):
        cells = [str(theirs.table), row.data, row.model, str(row.n), _mean(row.baseline, 2), _mean(row.last, 2)]
        cells += [_mean(row.best, 2), _figure(theirs.top1, 2)]
        cells += [_mean(row.flops, 1), _figure(theirs.flops, 1), _mean(row.params, 1), _figure(theirs.params, 1)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def with_table(text: str) -> str:
    """`text` with the table where its marks are."""
    return replace_tables(text, lambda name: table() if name == "results" else None)


def _mean(values: Spread, digits: int) -> str:
    return _figure(values.mean, digits)


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
