"""`report` and `compare`."""

import copy
import json
from pathlib import Path

from softprune.cli.reports import comparison_rows


def test_report_of_a_finished_run(softprune, finished: Path) -> None:
    result = softprune("report", str(finished))
    assert result.exit_code == 0
    assert (finished / "report.html").is_file()
    assert softprune("report", "nothing").exit_code == 2


def test_compare_prints_a_row_per_method_and_writes_a_page(softprune, finished: Path, tmp_path: Path) -> None:
    result = softprune("compare", str(finished), str(finished / "dense"), "--out", "page.html")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "page.html").stat().st_size > 5_000
    header, *rows = result.output.splitlines()[:3]
    assert "drop" in header
    assert [row.split()[2] for row in rows] == ["dense", "scp"]


def test_seeds_are_averaged_and_the_drop_is_against_the_runs_own_baseline(finished: Path) -> None:
    first = json.loads((finished / "result.json").read_text())
    second = copy.deepcopy(first)
    second["seed"] = 1
    second["last"]["top1"] = first["last"]["top1"] + 2.0
    (row,) = comparison_rows([first, second])
    assert row[4] == "2"
    mean = first["last"]["top1"] + 1.0
    assert row[5] == f"{mean:.2f} +- 1.41"
    assert row[7] == f"{first['table'][0]['top1'] - mean:.2f} +- 1.41"
    (alone,) = comparison_rows([first])
    assert "+-" not in alone[5]


def test_an_unfinished_run_cannot_be_compared(softprune, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    result = softprune("compare", "run")
    assert result.exit_code == 2
    assert "softprune resume run" in result.stderr
