"""The paper's table: rows per method and fine-tuning, means over seeds, and the paper's figures beside ours."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from synthetic_runs import make

from softprune.errors import FileFormatError
from softprune.lab.config.recipes import load_recipe, recipe_files
from softprune.lab.config.settings import RunConfig
from softprune.lab.report import (
    PaperRow,
    csv_text,
    markdown,
    paper_figures,
    paper_rows,
    paper_table_rows,
    paper_tables,
    paper_tables_markdown,
    table_cells,
)
from softprune.lab.runs.reading import Run, best_latencies, load_run
from softprune.lab.runs.result import Epoch, Moment, Totals, Variant

NOTHING = {"channels": 0, "params": 0, "macs": 0}


def run(name: str, method: str, seed: int = 0, top1: float = 90.0, **more: object) -> Run:
    dense = Totals(macs=100, params=50, channels=10, paper_flops=210, paper_params=50, paper_channels=10)
    compact = Totals(macs=40, params=20, channels=5, paper_flops=105, paper_params=30, paper_channels=4)
    values = {
        "path": Path(name),
        "name": name,
        "model": "vgg16",
        "data": "cifar10",
        "method": method,
        # Runs of other names are other experiments.
        "config": {"seed": seed, "method": {"name": method, "options": {"name": name}}},
        "command": "",
        "finished": "",
        "wall_seconds": None,
        "epochs": (),
        "seed": seed,
        "dense": dense,
        "compact": dense if method == "dense" else compact,
        "best": Moment(epoch=3, top1=top1 + 1, top5=None, **NOTHING),
        "last": Moment(epoch=5, top1=top1, top5=None, **NOTHING),
        **more,
    }
    return Run.model_construct(**values | {"config": RunConfig(**values["config"])})


def finetuned(name: str, seed: int = 0) -> Run:
    row = Epoch(
        epoch=0,
        step=1,
        phase="finetune",
        lr=0.1,
        train_loss=None,
        train_top1=0.0,
        seconds=1.0,
        images_per_second=1.0,
        **NOTHING,
    )
    table = (_variant("dense", None), _variant("masked", 12.0), _variant("compact", 91.0))
    return run(name, "slimming", seed, 91.0, table=table, epochs=(row,), wall_seconds=180.0)


def _variant(name: str, top1: float | None) -> Variant:
    sizes = {"params": 0, "macs": 0, "file_bytes": None, "latency_ms": None}
    return Variant(name=name, top1=top1, top5=None, **sizes)


def test_seeds_are_averaged_and_the_drop_is_against_the_dense_runs() -> None:
    dense = [run("cifar10-vgg16-dense", "dense", seed, 93.0 + seed) for seed in (0, 1)]
    pruned = [run("cifar10-vgg16-scp", "scp", seed, 92.0 + 2 * seed, wall_seconds=60.0 + 60 * seed) for seed in (0, 1)]
    first, second = paper_rows([*pruned, *dense])
    assert (first.method, first.drop.n, first.channels.n) == ("Dense", 0, 0)
    assert (second.method, second.n, second.finetuned) == ("SCP", 2, False)
    assert (second.baseline.mean, second.baseline.deviation) == (93.5, None)  # one number for both
    assert (second.last.mean, second.best.mean, second.drop.mean) == (93.0, 94.0, 0.5)
    assert second.drop.deviation == pytest.approx(2**0.5)
    # As the paper counts, where it does; MACs exactly.
    assert (second.channels.mean, second.params.mean, second.flops.mean) == pytest.approx((60, 40, 50))
    assert second.macs.mean == pytest.approx(60)
    assert (second.minutes.mean, first.minutes.mean) == (1.5, None)
    assert second.paper is paper_figures()["cifar10-vgg16-scp"]
    assert second.paper.top1 == 93.79


def scp(strength: float, seed: int = 0, top1: float = 90.0, **method: object) -> Run:
    settings = {"seed": seed, "method": {"name": "scp", "strength": strength, **method}}
    return run("digits", "scp", seed, top1, config=settings)


def run_column(rows: list[PaperRow]) -> list[tuple[str, str]]:
    heads, cells = table_cells(rows)
    return [(line[heads.index("run")], line[heads.index("n")]) for line in cells]


def test_experiments_of_one_name_are_rows_of_their_own() -> None:
    rows = paper_rows([scp(6e-5, 0, 90.0), scp(1e-4, 0, 80.0), scp(6e-5, 1, 92.0)])
    assert [(row.name, row.n, row.last.mean) for row in rows] == [("digits", 2, 91.0), ("digits", 1, 80.0)]
    assert run_column(rows) == [("digits (strength 6e-5)", "2"), ("digits (strength 1e-4)", "1")]
    assert "digits (strength 6e-5)" in markdown(rows)
    # What only one of them sets is said of both.
    rows = paper_rows([scp(1e-4), scp(1e-4, options={"warmup": 3})])
    assert run_column(rows) == [("digits (no warmup)", "1"), ("digits (warmup 3)", "1")]


def test_one_experiment_with_several_seeds_is_one_row() -> None:
    assert run_column(paper_rows([scp(1e-4, 0), scp(1e-4, 1)])) == [("digits", "2")]
    # Each builds on the run of its own seed.
    runs = [scp(1e-4, seed, options={"plan": f"/sweep/scp-seed{seed}"}) for seed in (0, 1, 10)]
    assert run_column(paper_rows(runs)) == [("digits", "3")]
    others = [scp(1e-4, 0, options={"plan": f"/{sweep}/scp-seed0"}) for sweep in ("a", "b")]
    assert [n for _, n in run_column(paper_rows(others))] == ["1", "1"]


def test_a_fine_tuned_run_gives_both_rows() -> None:
    before, after = paper_rows([finetuned("cifar10-vgg16-slimming-ft")])
    assert (before.finetuned, before.last.mean, before.best.mean) == (False, 12.0, None)
    assert (after.finetuned, after.last.mean, after.best.mean) == (True, 91.0, 92.0)
    assert before.paper is not None
    assert before.paper.top1 == 10.0
    assert after.paper is not None
    assert after.paper.top1 == 92.91
    # A run of its own without fine-tuning says it better.
    alone = run("cifar10-vgg16-slimming", "slimming", top1=11.0)
    rows = paper_rows([finetuned("cifar10-vgg16-slimming-ft"), alone])
    assert sorted((row.finetuned, row.last.mean, row.n) for row in rows) == [(False, 11.0, 1), (True, 91.0, 1)]


def test_the_ablation_has_a_label_of_its_own() -> None:
    (row,) = paper_rows([run("x", "scp", config={"masks": {"use_relu": False}})])
    assert row.method == "SCP without ReLU"


def test_the_papers_columns_appear_beside_ours() -> None:
    rows = paper_rows([run("cifar10-vgg16-scp", "scp")])
    heads, (cells,) = table_cells(rows)
    line = dict(zip(heads, cells, strict=False))
    assert line["fine-tuned"] == "no"
    assert line["model"] == "VGG-16"
    assert (line["best, ours"], line["best, paper"]) == ("91.00", "93.79")
    assert (line["FLOPs cut, ours"], line["FLOPs cut, paper"]) == ("50.0", "66.2")
    assert not any("paper" in head for head in table_cells(paper_rows([run("my own", "scp")]))[0])
    text = markdown(rows)
    assert text.splitlines()[0].count("|") == text.splitlines()[2].count("|") == len(heads) + 1


def test_names_are_text_in_markdown_and_have_no_control_characters() -> None:
    (row,) = paper_rows([run("a|b<script>[x](y)`\x1b[31m\n", "scp")])
    text = markdown([row])
    assert "\x1b" not in text
    assert "<script>" not in text
    assert r"a\|b&lt;script>\[x\](y)\`\\x1b\[31m\\n" in text
    assert text.splitlines()[2].replace(r"\|", "").count("|") == text.splitlines()[0].count("|")
    assert "\x1b" not in csv_text([row])
    (row,) = paper_rows([run("=HYPERLINK(1)", "scp")])
    assert ",'=HYPERLINK(1)," in csv_text([row])


def test_csv_has_full_precision() -> None:
    rows = paper_rows([run("cifar10-vgg16-scp", "scp", seed, 92.0 + seed / 3) for seed in (0, 1)])
    (line,) = csv.DictReader(io.StringIO(csv_text(rows)))
    assert float(line["last mean"]) == pytest.approx(92 + 1 / 6, abs=1e-12)
    assert (line["n"], line["fine-tuned"], line["best paper"], line["front"]) == ("2", "no", "93.79", "yes")


def test_the_front_is_what_no_other_row_beats() -> None:
    def cheap(name: str, top1: float, macs: int) -> Run:
        return run(name, "scp", 0, top1, compact=Totals(macs=macs, params=20, channels=5))

    runs = [cheap("good", 92.0, 40), cheap("worse", 91.0, 40), cheap("smaller", 90.0, 20), cheap("bad", 89.0, 30)]
    assert [row.name for row in paper_rows(runs) if row.on_front] == ["good", "smaller"]


def test_the_papers_tables_have_all_its_rows_and_ours_where_there_is_a_run() -> None:
    rows = paper_rows([run("cifar10-vgg16-scp", "scp")])
    tables = paper_tables(rows)
    assert [title for title, _, _ in tables] == [f"Table {number} of the paper" for number in range(1, 9)]
    assert sum(len(cells) for _, _, cells in tables) == len(paper_table_rows()) == 62
    lines = {line[0]: dict(zip(heads, line, strict=True)) for _, heads, cells in tables for line in cells}
    ours = lines["cifar10-vgg16-scp"]
    assert (ours["runs"], ours["best, paper"], ours["best, ours"]) == ("1", "93.79", "91.00")
    assert lines["cifar10-vgg19-scp"]["best, ours"] == "-"
    assert "| cifar10-vgg16-scp | 1 |" in paper_tables_markdown(rows)


def test_pages_name_the_precision_and_the_runs_of_another() -> None:
    rows = paper_rows([run(name, "scp") for name in ("one", "two", "three", "exact")])
    usual = rows[0].precision
    for page in (markdown(rows), paper_tables_markdown(rows)):
        assert page.endswith(f" Trained in {usual}.\n")
    exact = replace(next(row for row in rows if row.name == "exact"), precision="float64")
    rows = [*(row for row in rows if row.name != "exact"), exact, exact]
    assert markdown(rows).endswith(f" Trained in {usual}; in float64: exact.\n")


def test_seeds_of_different_precisions_are_named() -> None:
    config = {"method": {"name": "scp", "options": {}}, "train": {"precision": "tf32"}}
    seeds = [run("one", "scp", seed, config={"seed": seed, **config}) for seed in (0, 1)]
    on_cpu = seeds[1].model_copy(update={"environment": SimpleNamespace(device="CPU")})
    assert [row.precision for row in paper_rows(seeds)] == ["float32 with TF32"]
    assert [row.precision for row in paper_rows([seeds[0], on_cpu])] == ["float32 and float32 with TF32"]


def test_a_record_of_tiny_imagenet_fills_the_rows_of_imagenet_and_is_marked(tmp_path: Path) -> None:
    heads, cells = next((heads, cells) for title, heads, cells in paper_tables([]) if title == "Table 4 of the paper")
    ours = [number for number, head in enumerate(heads) if head == "runs" or head.endswith("ours")]
    assert {line[number] for line in cells for number in ours} == {"-"}
    record = make(tmp_path, "digits_net", epochs=2)
    place = {"name": "tinyimagenet-resnet50-scp-ft", "model": "resnet50_64", "data": "folder"}
    (tmp_path / "result.json").write_text(json.dumps(record | place))
    rows = paper_rows([load_run(tmp_path)])
    tables = {title.partition(",")[0]: (title, heads, cells) for title, heads, cells in paper_tables(rows)}
    title, heads, cells = tables["Table 4 of the paper"]
    assert "Tiny-ImageNet as a stand-in for ImageNet" in title
    lines = {line[0]: dict(zip(heads, line, strict=True)) for line in cells}
    ours = lines["imagenet-resnet50-scp-ft (ours: tinyimagenet-resnet50-scp-ft)"]
    assert (ours["runs"], ours["drop, paper"]) == ("1", "0.62")
    assert float(ours["compact, ours"]) > 0
    assert float(ours["FLOPs cut, ours"]) > 0
    assert float(ours["speed-up, ours"]) > 0
    assert float(ours["dense ms, ours"]) > float(ours["compact ms, ours"]) > 0
    sites = record["sites"]
    kept = sum(site["kept"] for site in sites) / sum(site["width"] for site in sites)
    assert rows[0].channels.mean == pytest.approx(100 - 100 * kept)
    assert lines["imagenet-resnet50-sss"]["best, ours"] == "-"
    assert tables["Table 8 of the paper"][0] == "Table 8 of the paper"
    assert "speed-up, ours" not in tables["Table 1 of the paper"][1]


def test_latencies_that_were_measured_alone_replace_those_of_the_run(tmp_path: Path) -> None:
    record = make(tmp_path, "digits_net", epochs=2)
    (tmp_path / "result.json").write_text(json.dumps(record))
    run, file = load_run(tmp_path), tmp_path / "bench.json"
    assert best_latencies(run) == run.latencies is not None

    def times(dense: float, compact: float, batch: int = run.latency_batch) -> dict[str, object]:
        return {"dense": {"median_ms": dense}, "compact": {"median_ms": compact}, "batch": batch, "backend": "eager"}

    missing = {"dense": None, "compact": None, "batch": run.latency_batch, "backend": "compile"}
    rounded = times(3, 1) | {"round_to": 8}  # another network than the one whose costs the row has
    file.write_text(
        json.dumps({"format": 1, "rows": [times(9, 5), times(8, 2), times(3, 1, batch=1), rounded, missing]})
    )
    (row,) = paper_rows([run])
    assert (row.dense_ms.mean, row.compact_ms.mean, row.speed_up.mean) == (8, 2, 4)
    assert load_run(tmp_path).latencies == run.latencies, "what the run's own page shows"
    file.write_text(json.dumps({"format": 1, "rows": [missing, times(3, 1, batch=1)]}))
    assert best_latencies(run) == run.latencies


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        ('{"rows": [{"backend": "compile"}]}', "rows.0.batch"),
        ('{"rows": [{"batch": 64, "dense": {"median_ms": 1}, "compact": {"median_ms": 0}}]}', "greater than 0"),
        ('{"rows": [{"batch": 64, "dense": {"median_ms": "1"}, "compact": null}]}', "median_ms"),
        ('{"benchmarks": []}', "rows"),
        ("[]", "object"),
        ("\0", "must be JSON"),
    ],
)
def test_a_foreign_bench_json_is_named_by_comparisons_and_ignored_elsewhere(
    tmp_path: Path, content: str, rule: str
) -> None:
    (tmp_path / "result.json").write_text(json.dumps(make(tmp_path, "digits_net", epochs=2)))
    (tmp_path / "bench.json").write_text(content)
    run = load_run(tmp_path)
    with pytest.raises(FileFormatError, match=rf"bench.json.*{rule}.* Run `softprune bench` again, or remove the file"):
        paper_rows([run])


def test_the_papers_figures_hang_together() -> None:
    for figures in paper_table_rows():
        if figures.top1 is not None and figures.baseline is not None:
            assert figures.baseline - figures.top1 == pytest.approx(figures.drop, abs=0.005), figures
    assert len(paper_figures()) == 52


def test_a_run_to_a_target_of_ones_own_or_on_another_network_is_none_of_the_papers_rows() -> None:
    amounts = ({"macs": 0.5}, {"macs": "50%"}, {"macs": 60_000_000}, {"params": 0.3})
    targets = [run("cifar10-vgg16-scp", "scp", config={"method": {"target": each}}) for each in amounts]
    other = run("cifar10-vgg19-scp", "scp")  # the name of a recipe, on a VGG-16
    assert [row.paper for row in paper_rows([*targets, other])] == [None] * 5


def test_a_run_to_the_papers_flops_has_its_figures_beside_it() -> None:
    theirs = run("cifar100-vgg16-scp", "scp", config={"method": {"target": {"macs": 0.4855}}})
    (row,) = paper_rows([theirs])
    assert row.paper is paper_figures()["cifar100-vgg16-scp"]
    # That is what the recipes ask for where the paper has no strength.
    targets = {name: load_recipe(name).method.target for name in recipe_files() if name in paper_figures()}
    named = {name: target for name, target in targets.items() if target is not None and "macs" in target}
    assert named
    for name, target in named.items():
        config = {"method": {"target": target}}
        network = name.split("-")[1]
        (row,) = paper_rows([run(name, "scp", model=network, config=config)])
        assert row.paper is paper_figures()[name], name
