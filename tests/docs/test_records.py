"""Tables in documents are what their commands render from the records."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from softprune.lab.cli import main
from softprune.lab.report import paper_table_rows

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


def test_security_page_is_rendered_from_its_records() -> None:
    module = script("security_page")
    assert module.PAGE.read_text() == module.page(module.PAGE.read_text())


def test_accuracy_is_rendered_from_the_records() -> None:
    module = script("accuracy_table")
    assert module.PAGE.read_text() == module.page(), "run python benchmarks/accuracy_table.py"
    for document in module.DOCUMENTS:
        assert document.read_text() == module.with_table(document.read_text())


def test_fixed_strengths_are_interpolated_to_the_cut_of_a_target() -> None:
    module = script("accuracy_table")

    def run(strength: float, macs: int, top1: float) -> SimpleNamespace:
        totals = SimpleNamespace(macs=macs), SimpleNamespace(macs=100)
        config = SimpleNamespace(method=SimpleNamespace(strength=strength))
        return SimpleNamespace(config=config, compact=totals[0], dense=totals[1], compact_top1=top1)

    runs = [run(1.0, 50, 80.0), run(1.0, 54, 82.0), run(2.0, 40, 75.0)]
    assert module.interpolated(runs, 54.0) == pytest.approx(78.0)
    assert module.interpolated(runs, 70.0) == 75.0
    assert module.interpolated(runs, 10.0) == 81.0


def test_what_is_missing_is_listed() -> None:
    module = script("missing")
    there = module.measured()
    page = (module.RESULTS / "MISSING.md").read_text()
    assert page == module.missing_page(there), "run python benchmarks/missing.py"
    names = {name for name, _ in there}
    for row in paper_table_rows():
        assert (f"| {row.recipe} |" in page) == (row.recipe not in names and row.stand_in not in names)


def test_figure_4_is_drawn_from_the_records() -> None:
    module = script("figure4")
    runs = module.runs()
    assert runs
    assert (module.RESULTS / "FIGURE4.md").read_text() == module.page(runs)
    for data, (_, file, low, high) in module.FIGURES.items():
        own = [run for run in runs if run.data == data]
        assert (module.RESULTS / file).read_text() == module.drawing(own, low, high)


def test_sparsity_is_saturated_where_it_stays_near_its_final_value() -> None:
    module = script("figure4")
    kept = [100, 60, 40, 50, 41, 40, 40]
    run = SimpleNamespace(
        dense=SimpleNamespace(channels=100), epochs=[SimpleNamespace(channels=count) for count in kept]
    )
    assert module.removed(run)[1] == 40
    assert module.saturation(run) == 5
    run.epochs = run.epochs[-1:]
    assert module.saturation(run) == 1


@pytest.mark.parametrize(
    ("page", "names", "options"),
    [("RESULTS.md", ["cifar*"], []), ("PAPER.md", ["cifar*", "tinyimagenet*"], ["--paper-tables"])],
)
def test_results_are_rendered_from_their_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str, names: list[str], options: list[str]
) -> None:
    runs = [str(path.parent) for name in names for path in sorted((ROOT / "results").glob(f"{name}/result.json"))]
    assert runs
    monkeypatch.setattr("sys.argv", ["softprune", "compare", *runs, *options, "--out", str(tmp_path / page)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert (tmp_path / page).read_text() == (ROOT / "results" / page).read_text()


def test_the_readme_s_table_is_rendered_from_the_records() -> None:
    module = script("readme_table")
    text = module.README.read_text()
    assert module.with_table(text) == text
    assert text.count("| CIFAR-10 | VGG-16 |") == 1


def test_the_tables_of_the_page_on_scale_are_rendered_from_the_records() -> None:
    module = script("scale_plan")
    text = module.PAGE.read_text()
    assert module.with_tables(text) == text
    assert all(text.count(f"<!-- table: {name} -->\n| ") == 1 for name in module.TABLES)


def test_the_table_of_a_sweep_is_rendered_from_its_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = sorted((ROOT / "results").glob("*/TABLE.md"))
    assert tables
    for table in tables:
        page = tmp_path / f"{table.parent.name}.md"
        monkeypatch.setattr("sys.argv", ["softprune", "compare", str(table.parent), "--out", str(page)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        assert page.read_text() == table.read_text()
