"""`report` and `compare`."""

import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from softprune.lab.cli.output import print_table
from softprune.lab.cli.reports import print_result
from softprune.lab.runs.folder import RunFolder

ROOT = Path(__file__).parents[3]


def test_report_of_a_finished_run(softprune, finished: Path) -> None:
    result = softprune("report", str(finished))
    assert result.exit_code == 0
    assert '<span class="by">SCP</span>' in (finished / "report.html").read_text()
    assert softprune("report", "nothing").exit_code == 2
    elsewhere = softprune("report", str(finished), "--out", "pages/run.html")  # the run may be on a read-only disk
    assert elsewhere.output == "Report: pages/run.html\n"
    assert Path("pages/run.html").read_text() == (finished / "report.html").read_text()


def test_compare_prints_a_row_per_method_and_writes_a_page(softprune, finished: Path, tmp_path: Path) -> None:
    result = softprune("compare", str(finished), str(finished / "dense"), "--out", "page.html")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "page.html").stat().st_size > 5_000
    title, header, *rows = result.output.splitlines()[:4]
    assert title == "tiny_networks:tiny on digits"
    assert "change" in header
    assert "paper" not in header
    assert [row.split()[0] for row in rows] == ["Dense", "SCP"]


@pytest.mark.parametrize("command", ["report", "compare"])
def test_pages_and_tables_do_not_wait_for_torch(finished: Path, tmp_path: Path, command: str) -> None:
    code = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); import softprune.lab.cli as cli"
    arguments = [
        sys.executable,
        "-c",
        f"{code}; cli.main()",
        command,
        str(finished),
        "--out",
        str(tmp_path / "page.html"),
    ]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_compare_takes_a_whole_sweep_and_writes_its_table(softprune, finished: Path, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    for seed, name in enumerate(("one", "two")):
        shutil.copytree(finished, sweep / name)
        record = json.loads((finished / "result.json").read_text())
        record["seed"] = record["config"]["seed"] = seed
        (sweep / name / "result.json").write_text(json.dumps(record))
    (sweep / "just begun").mkdir()
    (sweep / "just begun" / "config.toml").touch()
    (sweep / "logs").mkdir()
    result = softprune("compare", str(sweep), "--out", "tables/table.md")
    assert result.exit_code == 0, result.output
    assert f"`softprune resume '{sweep / 'just begun'}'` finishes it" in result.output.replace("\n", " ")
    lines = (tmp_path / "tables" / "table.md").read_text().splitlines()
    assert lines[2].split(" | ")[4] == "2"
    assert "±" in lines[2]


def test_a_table_that_cannot_be_written_is_one_clear_message(
    softprune, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "table.md").write_text("before")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("softprune.io.os.fsync", full)
    result = softprune("compare", str(finished), "--out", "table.md")
    assert result.exit_code == 2
    assert "room for table.md" in result.stderr
    assert "make room, then compare again" in result.stderr
    assert (tmp_path / "table.md").read_text() == "before"


def test_an_unfinished_run_cannot_be_compared(softprune, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    result = softprune("compare", "run")
    assert result.exit_code == 2
    assert "softprune resume run" in result.stderr


def test_unfinished_runs_are_left_out_with_a_line_each(softprune, finished: Path, tmp_path: Path) -> None:
    for name in ("a", "c"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.toml").touch()
    none = [softprune("compare", *given) for given in (["runs"], ["runs/a", "runs/c"])]
    for result in none:
        assert result.exit_code == 2
        assert "none among the 2" in result.stderr
    shutil.copytree(finished, tmp_path / "runs" / "b")
    (tmp_path / "runs" / "logs").mkdir()
    swept, listed = (
        softprune("compare", "runs"),
        softprune("compare", *(f"runs/{name}" for name in "abc"), "runs/logs"),
    )
    assert swept.exit_code == listed.exit_code == 0, listed.output
    assert swept.stdout == listed.stdout
    for result in (swept, listed):
        assert [line.split()[2] for line in result.stderr.splitlines() if "resume" in line] == ["runs/a", "runs/c"]
    assert "runs/logs holds no run" in listed.stderr
    assert softprune("compare", "runs", "nowhere").exit_code == 2


def test_a_run_done_twice_counts_once_and_a_line_says_so(softprune, finished: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        shutil.copytree(finished, tmp_path / "runs" / name)
    result = softprune("compare", "runs", "--out", "table.md")
    assert result.exit_code == 0, result.output
    assert "runs/two has the configuration and seed of runs/one" in result.stderr
    assert (tmp_path / "table.md").read_text().splitlines()[2].split(" | ")[4] == "1"


def test_watch_writes_the_page_again_until_the_run_ends(
    softprune, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(finished / "config.toml", run)
    lines = (finished / "metrics.jsonl").read_text().splitlines(keepends=True)
    pages = []

    def time_passes(seconds: float) -> None:
        page = run / "report.html"
        pages.append(page.read_text() if page.is_file() else "")
        if len(pages) > len(lines) + 1:
            shutil.copy(finished / "result.json", run)
        else:
            (run / "metrics.jsonl").write_text("".join(lines[: len(pages) - 1]) or lines[0][:40])

    monkeypatch.setattr("softprune.lab.cli.reports.time.sleep", time_passes)
    result = softprune("report", str(run), "--watch")
    assert result.exit_code == 0, result.output
    assert result.output.count("Report: ") == 2
    assert pages[:2] == ["", ""]  # nothing yet, then half a line
    assert 'http-equiv="refresh"' in pages[2]
    assert 'http-equiv="refresh"' not in (run / "report.html").read_text()
    assert softprune("report", "nothing", "--watch").exit_code == 2


def test_a_speed_up_that_the_macs_do_not_explain_has_a_remark(capsys: pytest.CaptureFixture[str]) -> None:
    result = RunFolder(ROOT / "results" / "cifar10-vgg16-scp-s0").read_result()
    (macs,) = (row.macs for row in result.table if row.name == "compact")
    suggested = result.dense.macs / macs
    for speedup, has_remark in ((0.8, True), (1.2, False), (suggested, False), (3 * suggested, True)):
        times = {"dense": 10.0 * speedup, "compact": 10.0}
        table = [row.model_copy(update={"latency_ms": times.get(row.name)}) for row in result.table]
        print_result(result.model_copy(update={"table": table}))
        printed = capsys.readouterr().out
        assert f"Speed-up: {speedup:.2f}x" in printed
        assert (f"The MACs suggest up to {suggested:.1f}x" in printed) == has_remark
    print_result(result.model_copy(update={"table": table, "compact": result.dense}))
    assert "The MACs suggest" not in capsys.readouterr().out, "nothing was cut"


def test_top5_is_not_in_the_table_of_five_classes_or_fewer(capsys: pytest.CaptureFixture[str]) -> None:
    result = RunFolder(ROOT / "results" / "cifar10-vgg16-scp-s0").read_result()
    table = [row.model_copy(update={"top5": None}) for row in result.table]
    print_result(result.model_copy(update={"table": table}))
    heads = capsys.readouterr().out
    assert "top-1" in heads
    assert "top-5" not in heads


def test_a_column_of_dashes_is_not_said_to_lack_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")  # rich takes a dumb terminal to be 80 columns wide
    monkeypatch.setattr("softprune.lab.cli.output._out", Console(force_terminal=True, width=12))
    rows = [["some-run", "-", "1"], ["other-run", "-", "2"]]
    assert print_table("", ["run", "baseline", "minutes"], rows, optional=["baseline", "minutes"]) == ["minutes"]
