"""`--json` of the commands that print one result: standard output is JSON and nothing else."""

import json
from pathlib import Path

import pytest

OWN = ("--model", "tiny_networks:tiny")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("compact", "RUN", *OWN, "--out", "small"), {"file", "dense", "compact"}),
        (("export", "RUN", *OWN, "--out", "small.onnx"), {"path", "bytes", "dense_bytes", "runtime", "max_difference"}),
        (("bench", "RUN", *OWN, "--batch", "1", "--repeats", "2"), {"rows", "dense_macs", "environment"}),
        (("train", "tiny.toml", "--dry-run"), {"params", "macs", "sites", "frozen", "device", "folder", "config"}),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_json_of_a_command(softprune, finished: Path, arguments: tuple[str, ...], expected: set[str]) -> None:
    filled = [str(finished) if part == "RUN" else part for part in arguments]
    result = softprune(*filled, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert expected <= set(found)
    if "compact" in found:
        assert found["compact"]["macs"] < found["dense"]["macs"]


def test_json_of_compare(softprune, finished: Path) -> None:
    arguments = ("compare", str(finished), str(finished / "dense"), "--json")
    rows = json.loads(softprune(*arguments).stdout)
    assert [row["method"] for row in rows] == ["Dense", "SCP"]
    assert rows[1]["MACs_cut"]["mean"] > 0


def test_json_of_a_sweep_that_is_not_run(softprune, tmp_path: Path) -> None:
    (tmp_path / "seeds.toml").write_text('[grid]\nseed = [0, 1]\n[[run]]\nrecipe = "tiny.toml"\n')
    result = softprune("sweep", "seeds.toml", "--dry-run", "--json")
    assert result.exit_code == 0, result.output
    assert [row["state"] for row in json.loads(result.stdout)] == ["new", "new"]


@pytest.mark.parametrize("arguments", [("train", "tiny.toml"), ("sweep", "tiny.toml")])
def test_json_of_a_training_needs_a_dry_run(softprune, arguments: tuple[str, ...]) -> None:
    result = softprune(*arguments, "--json")
    assert result.exit_code == 2
    assert "--dry-run" in result.stderr
