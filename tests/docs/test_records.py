"""Tables in documents are what benchmarks/render.py makes of the records, and the records keep their promises."""

import csv
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import render  # noqa: E402
from missing import PRICES, missing  # noqa: E402
from tables import paper_rows, runs  # noqa: E402

RECORDS = ROOT / "benchmarks" / "records"


@pytest.mark.parametrize("name", render.DOCUMENTS)
def test_tables_are_rendered_from_the_records(name: str) -> None:
    text = (ROOT / name).read_text()
    assert render.rendered(text) == text, "run python benchmarks/render.py"
    assert "| \n" not in text


def test_every_run_of_the_list_is_its_record() -> None:
    for run in csv.DictReader((ROOT / "results" / "runs.csv").read_text().splitlines()):
        if not run["folder"]:
            assert run["note"], run["name"]
            continue
        record = json.loads((ROOT / "results" / run["folder"] / "result.json").read_text())
        assert (run["name"], run["seed"], run["method"]) == (record["name"], str(record["seed"]), record["method"])
        assert run["last_top1"] == f"{record['last']['top1']:.2f}"


def test_every_missing_row_has_a_price() -> None:
    absent = missing()
    assert {run for _, _, run in absent} == PRICES.keys(), "remove what has a record from benchmarks/paper/missing.py"
    assert len(paper_rows()) == 62
    assert not {run["name"] for run in runs()} & PRICES.keys()


def test_sparsity_is_saturated_where_it_stays_near_its_final_value() -> None:
    kept = [100, 60, 40, 50, 41, 40, 40]
    run = {"dense": {"channels": 100}, "epochs": [{"channels": count} for count in kept]}
    assert render.figure4.removed(run)[1] == 40
    assert render.figure4.saturation(run) == 5


def test_the_zoo_is_exact_or_refused() -> None:
    rows = json.loads((RECORDS / "zoo.json").read_text())["rows"]
    norms = sum(row["batch_norms"] for row in rows)
    for results, share in ((rows, 0.7), ([row["all_kinds"] for row in rows], 0.9)):
        states = [result["status"] for result in results]
        assert set(states) <= {"exact", "refused"}
        assert states.count("exact") >= 0.9 * len(states)
        assert sum(result.get("masked", 0) for result in results) >= share * norms
    for row in rows:  # every BatchNorm is masked or has a reason
        for result in (row, row["all_kinds"]):
            if result["status"] == "exact":
                assert result["masked"] + sum(result["frozen"].values()) == row["batch_norms"], row["name"]


def test_site_kinds_reach_most_batch_norms_exactly() -> None:
    for row in json.loads((RECORDS / "reach.json").read_text())["rows"]:
        assert row["masked"][-1] >= 0.9 * row["norms"]
        assert row["difference"] < 1e-12


def test_certificates_hold_in_every_precision() -> None:
    eps = {"float32": 2**-23, "bfloat16": 2**-7, "float16": 2**-10}
    rows = json.loads((RECORDS / "certificates.json").read_text())["rows"]
    assert len(rows) == 30
    for row in (row for row in rows if "refused" not in row):
        assert row["float64"] <= 1e-10
        assert row["own"] <= 8 * max(row["own_masked"], eps[row["dtype"]]), row


def test_other_packages_have_no_failure() -> None:
    rows = json.loads((RECORDS / "packages.json").read_text())["rows"]
    assert {row["status"] for row in rows} <= {"exact", "not smaller", "refused", "met"}
    assert len({row["name"] for row in rows}) >= 60


def test_softprune_is_exact_wherever_torch_pruning_was_tried() -> None:
    rows = json.loads((RECORDS / "torch_pruning.json").read_text())["rows"]
    assert [row["softprune"]["status"] for row in rows] == ["exact"] * 20
    outcomes = {row["name"]: row["torch_pruning"]["status"] for row in rows}
    # Zero channels on both sides of a shortcut, and a channel shuffle.
    assert "exact" not in (outcomes["resnet20_a_centred"], outcomes["shufflenet_v2_x0_5"])


def test_cuts_of_the_comparison_meet_their_macs() -> None:
    rows = [row for row in json.loads((RECORDS / "from_trained.json").read_text())["rows"] if row["method"] != "dense"]
    assert len(rows) > 150
    assert all(row["keep"] * 0.9 < row["macs_ratio"] <= row["keep"] + 1e-4 for row in rows)


@pytest.mark.parametrize("name", ["fuzz", "kill"])
def test_nothing_was_found(name: str) -> None:
    assert not json.loads((RECORDS / f"{name}.json").read_text())["findings"]
