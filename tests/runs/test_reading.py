"""Run folders as they are found: finished, under way, torn, edited, of another version."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from softprune.errors import FileFormatError
from softprune.report import load_run, render_run

Make = Callable[..., tuple[Path, dict[str, Any]]]


def rewrite(folder: Path, record: dict[str, Any], **changes: Any) -> None:
    (folder / "result.json").write_text(json.dumps({**record, **changes}))


def test_a_finished_run_reads_as_it_was_written(make_run: Make) -> None:
    folder, record = make_run()
    run = load_run(folder)
    assert run.dense.macs == record["dense"]["macs"]
    assert run.best is not None
    assert run.best.top1 == record["best"]["top1"]
    assert [site.kept for site in run.sites] == [site["kept"] for site in record["sites"]]
    assert run.masks["delta"] == 0.05
    assert run.masks["gate_statistics"] == "both"
    assert not run.in_progress


def test_epochs_come_from_the_metrics_where_the_result_has_none(make_run: Make) -> None:
    folder, record = make_run()
    rewrite(folder, record, epochs=None)
    assert len(load_run(folder).epochs) == 12


def test_a_run_under_way_gives_a_page_of_what_there_is(make_run: Make) -> None:
    folder, record = make_run()
    (folder / "result.json").unlink()
    (folder / "config.toml").write_text('seed = 3\n[model]\nname = "digits_net"\n[method]\nname = "scp"\n')
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 12, "lr": 0.')  # a crash tore the line
    run = load_run(folder)
    assert run.in_progress
    assert run.model == "digits_net"
    assert run.method == "scp"
    assert run.seed == 3
    assert [row.epoch for row in run.epochs] == list(range(12))
    page = render_run(folder).read_text()
    assert "This run has not finished" in page
    assert "incomplete and was left out" in page
    assert f"{record['epochs'][-1]['test_top1']:.2f}" in page


def test_a_resumed_runs_second_line_for_an_epoch_counts(make_run: Make) -> None:
    folder, record = make_run()
    (folder / "result.json").unlink()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**record["epochs"][3], "test_top1": 12.34}) + "\n")
    assert load_run(folder).epochs[3].test_top1 == 12.34


def test_unknown_numbers_are_unknown_not_wrong(make_run: Make) -> None:
    folder, record = make_run()
    rows = [{**row, "test_top1": None, "train_loss": float("nan")} for row in record["epochs"]]
    table = [{**row, "top1": None, "latency_ms": None, "file_bytes": None} for row in record["table"]]
    rewrite(folder, record, epochs=rows, table=table, best=None, last=None, environment=None, masks=None)
    run = load_run(folder)
    assert run.epochs[0].train_loss is None
    assert run.shipped_top1 is None
    assert "not measured" in render_run(folder).read_text()


def test_a_dense_run_without_sites_has_a_page(make_run: Make) -> None:
    folder, record = make_run()
    rewrite(folder, record, sites=[], modules=[], method="dense", compact=record["dense"])
    page = render_run(folder).read_text()
    assert 'id="gaussians"' not in page
    assert "trained without pruning" in page
    assert 'id="decisions"' not in page
    assert 'id="epochs"' in page


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 2}, r"reads result format 1\. Got format 2"),
        ({"wall_seconds": "long"}, r"'wall_seconds' must be a number or null\. Got 'long'"),
        ({"dense": [1]}, r"'dense' must be an object or null"),
        ({"table": {}}, r"'table' must be a list"),
        ({"sites": [3]}, r"'sites\[0\]' must be an object"),
        ({"sites": [{"name": "bn", "width": 2, "kept": None}]}, r"sites\[0\]: 'kept' must be a whole number"),
        (
            {"sites": [{"name": "bn", "width": 2, "kept": 1, "beta": [0.1]}]},
            r"'beta' must have one entry per channel, 2\. Got 1",
        ),
        ({"sites": [{"name": "bn", "width": 2, "kept": 2, "keep": [True, False]}]}, r"Got 2"),
        (
            {"sites": [{"name": "bn", "width": 1, "kept": 1, "gamma": ["x"]}]},
            r"'gamma\[0\]' must be a number",
        ),
        (
            {"sites": [{"name": "bn", "width": 1, "kept": 1, "keep": [7]}]},
            r"'keep\[0\]' must be true or false",
        ),
    ],
)
def test_a_record_that_is_not_ours_is_refused_with_its_place(
    make_run: Make, change: dict[str, Any], says: str
) -> None:
    folder, record = make_run()
    rewrite(folder, record, **change)
    with pytest.raises(FileFormatError, match=says):
        render_run(folder)
    assert not (folder / "report.html").exists()


def test_files_that_are_not_json_or_not_there(make_run: Make, tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"holds result\.json, or metrics\.jsonl"):
        load_run(tmp_path / "nothing")
    folder, record = make_run()
    (folder / "result.json").write_text(json.dumps(record)[:1000])
    with pytest.raises(FileFormatError, match=r"result\.json: must be JSON"):
        load_run(folder)
    (folder / "result.json").write_text("[]")
    with pytest.raises(FileFormatError, match="must be a JSON object"):
        load_run(folder)
    (folder / "result.json").unlink()
    (folder / "metrics.jsonl").write_text('{"epoch": 0}\nnonsense\n{"epoch": 1}\n')
    with pytest.raises(FileFormatError, match="line 2"):
        load_run(folder)
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(FileFormatError, match="at least one finished epoch"):
        load_run(folder)
    (folder / "metrics.jsonl").write_text('{"epoch": 0}\n')
    (folder / "config.toml").write_text("seed = = 3")
    with pytest.raises(FileFormatError, match=r"config\.toml must be TOML"):
        load_run(folder)
