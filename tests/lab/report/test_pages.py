"""What stands on the pages equals what stands in the records, whatever the records are called."""

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from softprune.lab.report import render_comparison, render_run

Make = Callable[..., tuple[Path, dict[str, Any]]]
NASTY = "<script>alert('x')</script><img src=x onerror=alert(1)>\"'&"


class Outline(HTMLParser):
    """Elements, their attributes, and the values that cells carry."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def values(self) -> set[float]:
        found = (attributes.get("data-value") for _, attributes in self.tags)
        return {float(value) for value in found if value not in (None, "-", "yes", "no")}


def test_the_numbers_on_the_page_are_the_records(make_run: Make) -> None:
    folder, record = make_run("run", "vgg16", epochs=20)
    path = render_run(folder)
    assert path == folder / "report.html"
    page = path.read_text()
    values = Outline(page).values()
    for row in record["table"]:
        assert {row[key] for key in ("top1", "top5", "params", "macs", "file_bytes", "latency_ms")} <= values
    for site in record["sites"]:
        assert {site["kept"], site["width"]} <= values
    for module in record["modules"]:
        assert {module["macs_dense"], module["macs_compact"]} <= values
    for key in ("macs", "params", "channels"):
        removed = 100 * (1 - record["compact"][key] / record["dense"][key])
        assert removed in values
        assert f"-{removed:.1f}%" in page
    assert "VGG-16 on CIFAR-10, SCP</h1>" in page
    assert "one forward pass of 64 images on NVIDIA H200" in page
    assert record["command"] in page


def test_figures_of_held_out_images_are_called_so(make_run: Make) -> None:
    folder, record = make_run("run", epochs=3)
    config = record["config"]
    for holdout, text, other in ((0, "test top-1", "held-out top-1"), (100, "held-out top-1", "test top-1")):
        data = {**config["data"], "holdout": holdout}
        (folder / "result.json").write_text(json.dumps(record | {"config": {**config, "data": data}}))
        page = render_run(folder).read_text()
        assert text in page
        assert other not in page


def test_whatever_a_record_says_is_text(make_run: Make) -> None:
    folder, record = make_run()
    record |= dict.fromkeys(("name", "command", "model", "data", "method", "finished"), NASTY)
    record["environment"] |= dict.fromkeys(("python", "torch", "softprune", "device", "platform"), NASTY)
    record["config"] |= {"name": NASTY, "model": {"name": NASTY}, "data": {"name": NASTY, "dir": NASTY}}
    record["config"]["method"] |= {"name": NASTY, "include": [NASTY], "options": {NASTY: NASTY}}
    for part in (*record["sites"], *record["modules"]):
        part["name"] += NASTY
    for site in record["sites"]:
        site["activation"] = NASTY
    (folder / "result.json").write_text(json.dumps(record))
    for path in (render_run(folder), render_comparison([folder, folder], folder / "comparison.html")):
        outline = Outline(path.read_text())
        assert [tag for tag, _ in outline.tags].count("script") == 1  # the page's own, the only one that can run
        assert not [tag for tag, _ in outline.tags if tag in ("img", "iframe", "object", "embed", "link")]
        assert not [name for _, attributes in outline.tags for name in attributes if name.startswith("on")]


def test_a_page_is_one_file_that_fetches_nothing(make_run: Make) -> None:
    page = render_run(make_run()[0]).read_text()
    assert "default-src 'none'" in page
    assert not re.findall(r'(?:src|href)="(?!#)', page)
    assert not re.findall(r"url\((?!#)|@import", page)
    assert "https://" not in page


def test_variants_of_the_method_are_told(make_run: Make) -> None:
    folder, record = make_run()
    assert "then fine-tuned" not in render_run(folder).read_text()
    record["config"]["masks"] = {"use_relu": False}
    record["epochs"][-1]["phase"] = "finetune"
    (folder / "result.json").write_text(json.dumps(record))
    page = render_run(folder).read_text()
    assert "SCP without ReLU" in page
    assert "then fine-tuned" in page
    assert ">fine-tuning<" in page
    assert ", my-own</h1>" in render_run(make_run("own", method="my-own")[0]).read_text()


def test_runs_on_different_networks_and_data_compare_with_a_warning(make_run: Make, tmp_path: Path) -> None:
    folders = [make_run("a", "vgg16")[0], make_run("b", "digits_net")[0]]
    page = render_comparison(folders, tmp_path / "c.html").read_text()
    assert "cannot be compared" in page
    assert "2 networks" in page


def test_the_target_is_shown_with_its_path(make_run: Make) -> None:
    folder, record = make_run()
    assert 'id="target"' not in render_run(folder).read_text()
    limit = record["dense"]["macs"] // 2
    record["config"]["method"]["target"] = {"macs": 0.5}
    for position, row in enumerate(record["epochs"]):
        row["margin"] = 0.01 * position - 0.05
    record["finalised_step"] = record["epochs"][7]["step"]
    for macs in (limit - 1, limit + 1):
        record["compact"]["macs"] = macs
        (folder / "result.json").write_text(json.dumps(record))
        page = render_run(folder).read_text()
        assert f"At most {limit:,} MACs, 50.0% of the dense network." in page
        assert f"{macs:,}, 100.0% of the limit" in page
        assert f"final at step {record['epochs'][7]['step']:,}." in page
        assert ">cost after a cut, % of the limit<" in page
        assert "a cut: 105" in page


def test_the_dense_baseline_the_loss_and_the_learning_rate_are_drawn(make_run: Make) -> None:
    folder, record = make_run()
    page = render_run(folder).read_text()
    assert "dense top-1" not in page
    assert "penalty" not in page
    assert ">loss<" in page
    assert ">learning rate<" in page
    make_run("run/dense", level=0, method="dense")
    for row in record["epochs"]:
        row["penalty"] = 0.5
    for totals in (record["dense"], record["compact"]):
        totals["activations"] = 123_456
    (folder / "result.json").write_text(json.dumps(record))
    page = render_run(folder).read_text()
    assert all(text in page for text in ("dense top-1", "penalty: 0.5", ">123,456<"))


def test_the_warnings_of_the_run_are_on_its_page(make_run: Make) -> None:
    folder, _ = make_run()
    assert "problem" not in render_run(folder).read_text()
    lines = ["2026-01-01 10:00:00 INFO    epoch 1", *["2026-01-01 10:00:00 WARNING bf16 is <slow> here"] * 2]
    lines += [f"2026-01-01 10:00:00 ERROR   problem {number}" for number in range(30)]
    (folder / "run.log").write_text("\n".join(lines))
    page = render_run(folder).read_text()
    assert ">bf16 is &lt;slow&gt; here (2 times)<" in page
    assert "epoch 1<" not in page
    assert "problem 18<" in page
    assert "problem 19<" not in page
    assert ">11 more in run.log<" in page
