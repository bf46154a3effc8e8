"""A fast part of the zoo, and its page in step with its record."""

import dataclasses
import importlib
import json
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
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


# One of each kind: sums of BatchNorms, shuffle and concatenation, grouped and residual, depthwise with SE.
@pytest.mark.parametrize("name", ["repvgg_a0", "shufflenet_v2_x0_5", "regnetx_002", "lcnet_050"])
def test_networks_are_cut_exactly(zoo: ModuleType, name: str) -> None:
    entry = next(entry for entry in zoo.entries() if entry.name == name and entry.source != "softprune")
    row = zoo.examine(dataclasses.replace(entry, size=64), steps=1)
    assert row["status"] == "exact", row
    assert row["loss_is_finite"]
    assert row["macs_kept"] < 0.9
    assert row["macs_kept"] >= 1 - row["macs_reachable"]
    assert row["difference"] <= 1e-10 * row["scale"]
    assert row["predicted"]


@pytest.mark.parametrize(("name", "reason"), [("squeezenet1_0", "without any BatchNorm")])
def test_networks_without_a_site_are_refused_with_the_reason(zoo: ModuleType, name: str, reason: str) -> None:
    entry = next(entry for entry in zoo.entries() if entry.name == name)
    row = zoo.examine(dataclasses.replace(entry, size=64), steps=1)
    assert row["status"] == "refused"
    assert reason in row["reason"]


def test_a_crash_is_a_row(zoo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("out of luck")

    entry = zoo.Entry("broken", "nowhere", broken)
    monkeypatch.setattr(zoo, "entries", lambda: [entry])
    record = zoo.main(["--out", str(tmp_path / "zoo.json")])
    (row,) = record["rows"]
    assert row["status"] == "crash"
    assert "out of luck" in row["reason"]


def test_the_page_is_rendered_from_the_record(zoo: ModuleType, record: dict) -> None:
    assert zoo.DOCUMENT.read_text(encoding="utf-8") == zoo.render(record)


def test_the_record_covers_every_network_and_keeps_the_promise(zoo: ModuleType, record: dict) -> None:
    names = [(row["source"], row["name"]) for row in record["rows"]]
    assert names == [(entry.source, entry.name) for entry in zoo.entries()]
    states = [row["status"] for row in record["rows"]]
    assert set(states) <= {"exact", "refused"}
    assert states.count("exact") >= 0.9 * len(states)
    assert all("BatchNorm" in row["reason"] for row in record["rows"] if row["status"] == "refused")


def test_the_pages_of_other_packages_are_rendered_from_their_record() -> None:
    packages = importlib.import_module("packages")
    record = json.loads(packages.RECORD.read_text(encoding="utf-8"))
    assert packages.DOCUMENT.read_text(encoding="utf-8") == packages.render(record)
    page = packages.PAGE.read_text(encoding="utf-8")
    assert packages.with_table(page, record) == page
    assert page.count("| pytorchcv | ") == 1


def test_the_record_of_other_packages_covers_every_network_and_has_no_failure() -> None:
    packages = importlib.import_module("packages")
    rows = json.loads(packages.RECORD.read_text(encoding="utf-8"))["rows"]
    names = [(row["source"], row["name"], row["setting"]) for row in rows]
    assert names == [(entry.source, entry.name, setting) for entry, setting, _ in packages.jobs()]
    assert {row["status"] for row in rows} <= {"exact", "not smaller", "refused", "met"}
    assert len({name[:2] for name in names if name[0] in packages.SOURCES}) >= 60
    assert {row["source"] for row in rows} >= {*packages.SOURCES}
