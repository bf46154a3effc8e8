"""`export` and `bench`."""

import json
import shutil
from pathlib import Path

import pytest

OWN = ("--model", "tiny_networks:tiny")
"""The network of the tiny run, whose folder alone may not name code."""


def test_export_checks_the_file_and_prints_sizes(softprune, finished: Path, tmp_path: Path) -> None:
    file = tmp_path / "small.onnx"
    result = softprune("export", str(finished), *OWN, "--fold-bn", "--out", str(file))
    assert result.exit_code == 0, result.output
    rows = {line.split()[0]: line.split() for line in result.output.splitlines() if line}
    assert int(rows["compact"][1].replace(",", "")) == file.stat().st_size
    assert int(rows["dense"][1].replace(",", "")) > 0
    assert "differs by at most" in result.output


def test_export_into_a_folder_that_cannot_be(softprune, finished: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = softprune("export", str(finished), *OWN, "--out", str(tmp_path / "file" / "small.onnx"))
    assert result.exit_code not in (0, 1), result.output
    assert "The folder of small.onnx must be writable" in result.stderr
    assert "then export again" in result.stderr


def test_export_of_a_compact_network_outside_its_run(softprune, finished: Path, tmp_path: Path) -> None:
    shutil.copy(finished / "compact.safetensors", tmp_path / "small.safetensors")
    alone = softprune("export", "small")
    assert alone.exit_code == 2
    assert "--model" in alone.stderr
    # The file notes the shape of the images.
    whole = softprune("export", "small", "--model", "tiny_networks:tiny")
    assert whole.exit_code == 0, whole.output
    assert (tmp_path / "small.onnx").is_file()
    other = softprune("export", "small", "--model", "vgg16")
    assert other.exit_code == 2
    assert "must be the one that was pruned" in other.stderr


def test_bench_prints_rows_and_writes_a_record(softprune, finished: Path, tmp_path: Path) -> None:
    result = softprune(
        "bench", str(finished), *OWN, "--batch", "1,2", "--repeats", "2", "--threads", "1", "--out", "bench.json"
    )
    assert result.exit_code == 0, result.output
    assert len([line for line in result.output.splitlines() if line.startswith("eager")]) == 2
    record = json.loads((tmp_path / "bench.json").read_text())
    assert [row["batch"] for row in record["rows"]] == [1, 2]
    assert record["rows"][0]["realised"] > 0
    assert record["environment"]["torch"]


def test_bench_needs_no_weights_of_a_run(softprune, finished: Path, tmp_path: Path) -> None:
    record = json.loads((finished / "result.json").read_text())
    run = tmp_path / "record"
    run.mkdir()
    for name in ("config.toml", "result.json"):
        shutil.copy(finished / name, run / name)
    options = ("--batch", "2", "--repeats", "2", "--threads", "1", "--json")
    result = softprune("bench", str(run), *OWN, *options)
    assert result.exit_code == 0, result.output
    measured = json.loads(result.stdout)
    assert (measured["dense_macs"], measured["compact_macs"]) == (record["dense"]["macs"], record["compact"]["macs"])
    result = softprune("bench", str(run), *OWN, *options, "--round-to", "1000")
    rounded = json.loads(result.stdout)
    assert rounded["compact_macs"] == record["dense"]["macs"]
    assert [row["round_to"] for row in measured["rows"] + rounded["rows"]] == [0, 1000]
    without = record | {"sites": [site | {"keep": []} for site in record["sites"]]}
    (run / "result.json").write_text(json.dumps(without))
    result = softprune("bench", str(run), *OWN, *options)
    assert result.exit_code == 2
    assert "must have a record that says which channels were kept" in result.stderr
    other = record | {"compact": record["compact"] | {"params": 7}}
    (run / "result.json").write_text(json.dumps(other))
    result = softprune("bench", str(run), *OWN, *options)
    assert "does not have the sites or, cut, the parameters" in result.stderr.replace("\n", " ")


def test_bench_passes_the_compile_mode(softprune, finished: Path, monkeypatch) -> None:
    asked = {}
    monkeypatch.setattr("softprune.bench.compare_latency", lambda *args, **options: asked.update(options) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        raise softprune("bench", str(finished), *OWN, "--compile-mode", "max-autotune").exception
    assert asked["compile_mode"] == "max-autotune"


@pytest.mark.parametrize("command", ["export", "bench"])
def test_a_dense_run_has_no_compact_network_and_no_way_to_one(softprune, finished: Path, command: str) -> None:
    result = softprune(command, str(finished / "dense"), *OWN)
    assert result.exit_code == 2
    assert "Got the dense run" in result.stderr
    assert "softprune compact" not in result.stderr


@pytest.mark.parametrize("device", ["foo", "cuda:99"])
def test_a_device_that_is_not_there_is_named(softprune, finished: Path, device: str) -> None:
    result = softprune("bench", str(finished), *OWN, "--device", device)
    assert result.exit_code == 2
    assert f"--device {device}" in result.stderr or "--device must be" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("export", "nowhere"), "compact.safetensors"),
        (("bench", "nowhere", "--batch", "one"), "--batch must be whole numbers"),
        (("bench", "nowhere", "--batch", "1,²"), "--batch must be whole numbers"),
        (("bench", "nowhere", "--batch", "9" * 5000), "--batch must be whole numbers"),
        (("bench", "nowhere"), "compact.safetensors"),
        (("bench", "nowhere", "--round-to", "8"), "--round-to needs the folder of a finished run. Got nowhere"),
    ],
)
def test_mistakes_end_in_a_message(softprune, arguments: tuple[str, ...], message: str) -> None:
    result = softprune(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
