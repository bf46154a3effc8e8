"""The records of a run: what is written reads back, and damage is named with its file and field."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from softprune.errors import FileFormatError
from softprune.lab.config.settings import RunConfig, TrainConfig
from softprune.lab.report import render_run
from softprune.lab.runs.folder import RunFolder, load_run
from softprune.lab.runs.result import Epoch, best_epoch, parse

Make = Callable[..., tuple[Path, dict[str, Any]]]
ROOT = Path(__file__).parents[3]


def rewrite(folder: Path, record: dict[str, Any], **changes: Any) -> None:
    (folder / "result.json").write_text(json.dumps({**record, **changes}))


def row(**changes: Any) -> Epoch:
    values = {"epoch": 0, "step": 3, "lr": 0.1, "train_loss": 1.0, "train_top1": 50.0, "seconds": 1.0}
    return Epoch(**{**values, "images_per_second": 9.0, "channels": 1, "params": 2, "macs": 3, **changes})


def test_a_result_reads_back_as_it_was_written(make_run: Make) -> None:
    folder, _ = make_run()
    result = RunFolder(folder).read_result()
    text = result.to_json()
    again = parse(text.encode(), "result.json", "")
    assert again == result
    assert again.to_json() == text
    assert json.loads(text)["epochs"][3]["epoch"] == 3
    # One line per site and epoch, so that files stay small.
    assert len(text.splitlines()) < 80


def test_what_earlier_versions_wrote_is_left_out(make_run: Make) -> None:
    folder, record = make_run()
    settings = {"train": {"ema": 0.9, "epochs": 7}, "search": 1}
    rewrite(folder, record, sessions=[{"epoch": 3}], inputs=None, config=settings)
    result = RunFolder(folder).read_result()
    assert "sessions" not in json.loads(result.to_json())
    assert result.config == RunConfig(train=TrainConfig(epochs=7))


def test_a_loss_that_diverged_is_unknown() -> None:
    line = row(train_loss=float("nan"), test_loss=float("inf")).model_dump_json()
    assert json.loads(line)["train_loss"] is None
    assert Epoch.model_validate_json(line).test_loss is None


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("**/result.json")), ids=lambda p: p.parent.name)
def test_every_record_of_the_repository_is_one(path: Path) -> None:
    run = load_run(path.parent)
    assert run.epochs[-1].number == run.config.train.epochs + run.config.finetune.epochs
    assert (run.name, run.seed) == (run.config.name, run.config.seed)


@pytest.mark.parametrize(
    ("changes", "best"),
    [
        ([{}, {}, {}], 0),
        ([{"margin": -0.9}, {"margin": -0.1}, {"margin": 0.01}, {"margin": 0.0}], 2),
        ([{"margin": -0.1}, {"margin": 0.0}, {"margin": -0.1}], 1),
        ([{"margin": -0.9}, {"margin": -0.1}], 1),  # while it trains, the newest
        ([{"decided": False}, {}, {}], 1),
        ([{}, {"phase": "finetune"}, {"phase": "finetune"}], 1),
        ([{}, {"phase": "finetune"}], 1),
        ([{}, {"test_top1": None}], 0),
        ([{"test_top1": None}], None),
    ],
)
def test_the_best_epoch_is_one_of_the_final_network(changes: list[dict[str, Any]], best: int | None) -> None:
    rows = [row(epoch=number, **{"test_top1": 90.0 - number, **change}) for number, change in enumerate(changes)]
    found = best_epoch(rows)
    assert (found and found.epoch) == best


SITE = {"name": "bn", "activation": "relu", "width": 2, "kept": 1}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 3}, "Got 3 for 'format'"),
        ({"format": 1}, "Got 1 for 'format'"),
        ({"wall_seconds": "long"}, "Got 'long' for 'wall_seconds'.* a valid number"),
        ({"dense": {"channels": -1, "params": 1, "macs": 1}}, r"Got -1 for 'dense\.channels'"),
        ({"sites": [{**SITE, "kept": None}]}, r"Got None for 'sites\.0\.kept'"),
        ({"config": {"train": {"epochs": -1}}}, r"for 'config'.*train\.epochs must be greater"),
    ],
)
def test_a_record_that_is_not_ours_is_refused_with_its_field(make_run: Make, change: dict[str, Any], says: str) -> None:
    folder, record = make_run()
    rewrite(folder, record, **change)
    with pytest.raises(FileFormatError, match=rf"result\.json.*{says}") as caught:
        render_run(folder)
    assert str(caught.value).isprintable()
    assert not (folder / "report.html").exists()
    (folder / "result.json").write_text('{"format": 2')
    with pytest.raises(FileFormatError, match=r"Got .* 2': Invalid JSON"):
        render_run(folder)
