"""docs/budgets.md: its tables are those of the records."""

import importlib.util
import json
import re
from pathlib import Path

from softprune.budget.measures import MEASURES
from softprune.target import QUANTITIES

ROOT = Path(__file__).parents[2]
TABLE = re.compile(r"<!-- table: (\S+) -->\n(.*?)\n?<!-- end -->", re.DOTALL)


def load_benchmark():
    specification = importlib.util.spec_from_file_location("budgets", ROOT / "benchmarks" / "budgets.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_tables_are_rendered_from_their_records():
    tables = TABLE.findall((ROOT / "docs" / "budgets.md").read_text(encoding="utf-8"))
    assert tables
    for path, text in tables:
        record = json.loads((ROOT / path).read_text(encoding="utf-8"))
        assert text == load_benchmark().table(record["rows"]), "run python benchmarks/budgets.py --render"


def test_the_records_show_what_is_promised():
    missing = (ROOT / "results" / "MISSING.md").read_text(encoding="utf-8")
    for path in (ROOT / "benchmarks" / "records").glob("budgets-*.json"):
        for target, mean in json.loads(path.read_text(encoding="utf-8"))["mean"].items():
            assert mean["over"] == 0, (path.name, target)
            assert mean["most_under_percent"] <= 1, (path.name, target)
            # What has nothing to be compared with yet must stand in the list of what is missing.
            listed = f"--out benchmarks/records/{path.name}" in missing
            assert mean["compared"] == mean["runs"] or listed, (path.name, target)
            assert mean["compared"] == 0 or mean["top1_minus_fixed"] >= -0.3, (path.name, target)


def test_the_search_for_a_strength_brackets_and_narrows():
    following = load_benchmark().next_strength
    assert following([], 0.5, 1e-3) == 1e-3
    assert following([(-7.0, 0.9)], 0.5, 1e-3) > 2.718**-7
    assert following([(-7.0, 0.2)], 0.5, 1e-3) < 2.718**-7.1
    inside = following([(-7.0, 0.9), (-6.0, 0.2), (-9.0, 1.0)], 0.5, 1e-3)
    assert 2.718**-7.01 < inside < 2.718**-5.99


def test_every_quantity_has_a_measure_and_a_row() -> None:
    assert MEASURES.keys() == QUANTITIES.keys()
    page = ROOT / "docs" / "budgets.md"
    rows = page.read_text(encoding="utf-8").partition("## Targets")[2].partition("The amount")[0]
    assert re.findall(r"^\| `(\w+)`", rows, re.MULTILINE) == [*MEASURES]
