"""Tables in documents are what their commands render from the records."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from softprune.cli import main

ROOT = Path(__file__).parents[2]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_speed_page_is_rendered_from_its_record() -> None:
    module = script("speed_page")
    assert module.PAGE.read_text() == module.page(json.loads(module.RECORD.read_text()))


def test_results_are_rendered_from_their_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = sorted(str(path.parent) for path in (ROOT / "results").glob("*/result.json"))
    assert runs
    page = tmp_path / "RESULTS.md"
    monkeypatch.setattr("sys.argv", ["softprune", "compare", *runs, "--out", str(page)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert page.read_text() == (ROOT / "results" / "RESULTS.md").read_text()


def test_the_table_of_a_sweep_is_rendered_from_its_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = sorted((ROOT / "results").glob("*/TABLE.md"))
    assert tables
    for table in tables:
        page = tmp_path / f"{table.parent.name}.md"
        monkeypatch.setattr("sys.argv", ["softprune", "compare", str(table.parent), "--out", str(page)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        assert page.read_text() == table.read_text()
