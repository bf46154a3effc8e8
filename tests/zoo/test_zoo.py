"""A fast part of the zoo."""

import dataclasses
import importlib
import json
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
from topologies import LinearStream

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CRASH = {"status": "crash", "reason": "", "seconds": {}}
RECORD = BENCHMARKS / "records" / "zoo.json"

pytestmark = pytest.mark.skipif(
    None in (find_spec("torchvision"), find_spec("timm")), reason='the extras "vision" and "timm" are not installed'
)


@pytest.fixture(scope="module")
def zoo() -> ModuleType:
    return importlib.import_module("zoo")


@pytest.fixture(scope="module")
def record() -> dict:
    return json.loads(RECORD.read_text(encoding="utf-8"))


# One of each kind: sums of BatchNorms, grouped and residual, depthwise with SE. tests/cut/test_exactness.py cuts a
# network with shuffles and concatenations.
@pytest.mark.parametrize("name", ["repvgg_a0", "regnetx_002", "lcnet_050"])
def test_networks_are_cut_exactly(zoo: ModuleType, name: str) -> None:
    entry = next(entry for entry in zoo.entries() if entry.name == name and entry.source != "softprune")
    examine = importlib.import_module("zoo_row").examine
    assert_cut(examine(dataclasses.replace(entry, size=64), steps=1))


def test_a_row_has_the_default_and_all_kinds_of_sites(zoo: ModuleType) -> None:
    row = zoo.examine_both(zoo.Entry("stream", "tests", LinearStream, 8), steps=1)
    assert_cut(row)
    assert_cut(row["all_kinds"])
    assert row["masked"] < row["all_kinds"]["masked"] == row["batch_norms"]


def assert_cut(row: dict) -> None:
    assert row["status"] == "exact", row
    assert row["loss_is_finite"]
    assert row["macs_kept"] < 0.9
    assert row["macs_kept"] >= 1 - row["macs_reachable"]
    assert row["difference"] <= 1e-10 * row["scale"]
    assert row["predicted"]


@pytest.mark.parametrize(("name", "reason"), [("squeezenet1_0", "has no BatchNorm")])
def test_networks_without_a_site_are_refused_with_the_reason(zoo: ModuleType, name: str, reason: str) -> None:
    entry = next(entry for entry in zoo.entries() if entry.name == name)
    row = zoo.examine_both(dataclasses.replace(entry, size=64), steps=1)
    for result in (row, row["all_kinds"]):
        assert result["status"] == "refused"
        assert reason in result["reason"]


def test_a_crash_is_a_row(zoo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("out of luck")

    entry = zoo.Entry("broken", "nowhere", broken)
    monkeypatch.setattr(zoo, "entries", lambda: [entry])
    record = zoo.main(["--out", str(tmp_path / "zoo.json")])
    (row,) = record["rows"]
    assert row["status"] == "crash"
    assert "out of luck" in row["reason"]


def test_records_of_parts_are_merged_in_order(zoo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo, "entries", lambda: [zoo.Entry(name, "tests", LinearStream, 8) for name in "abc"])
    monkeypatch.setattr(zoo, "in_own_process", lambda entry, *_: {"name": entry.name, "source": entry.source} | CRASH)
    parts = [tmp_path / f"{part}.json" for part in (1, 2)]
    rows = [zoo.main(["--part", str(part), "2", "--out", str(path)])["rows"] for part, path in enumerate(parts, 1)]
    assert [[row["name"] for row in part] for part in rows] == [["a", "c"], ["b"]]
    other = json.loads(parts[1].read_text(encoding="utf-8"))
    other["environment"]["git"] = {"commit": "0" * 40, "changed": True}
    del other["rows"][0]["commit"]
    parts[1].write_text(json.dumps(other), encoding="utf-8")
    merged = zoo.main(["--out", str(tmp_path / "all.json"), "--merge", *map(str, parts)])
    assert [row["name"] for row in merged["rows"]] == ["a", "b", "c"]
    assert [row["commit"] == "0" * 12 + "+" for row in merged["rows"]] == [False, True, False]


def test_the_record_covers_every_network(zoo: ModuleType, record: dict) -> None:
    rows = record["rows"]
    assert [(row["source"], row["name"]) for row in rows] == [(entry.source, entry.name) for entry in zoo.entries()]


def test_the_record_of_other_packages_covers_every_network() -> None:
    packages = importlib.import_module("packages")
    rows = json.loads(packages.RECORD.read_text(encoding="utf-8"))["rows"]
    names = [(row["source"], row["name"], row["setting"]) for row in rows]
    assert names == [(entry.source, entry.name, setting) for entry, setting, _ in packages.jobs()]
