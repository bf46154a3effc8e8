"""The benchmark's script, tiny and on the CPU."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "step_time.py"


@pytest.fixture
def step_time():
    specification = importlib.util.spec_from_file_location("step_time", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield module
    torch.set_num_threads(threads)


def _arguments(out, *more):
    tiny = "--models resnet20 --device cpu --batch 2 --images 8 --steps 1 --repeats 2 --workers 0 --precisions fp32"
    return ["--out", str(out), *tiny.split(), *more]


def test_measures_every_variant_and_goes_on_where_it_stopped(step_time, tmp_path, capsys):
    out = tmp_path / "records" / "r.json"
    step_time.main(_arguments(out, "--variants", "fast"))
    first = json.loads(out.read_text())["rows"]
    assert [(row["variant"], row["masks"]) for row in first] == [("fast", True), ("fast", False)]
    record = step_time.main(_arguments(out, "--variants", "fast", "plain"))
    assert record == json.loads(out.read_text())
    assert record["rows"][:2] == first
    assert [(row["variant"], row["masks"]) for row in record["rows"][2:]] == [("plain", True), ("plain", False)]
    for row in record["rows"]:
        assert row["ms_least"] <= row["ms_per_step"] <= row["ms_most"]
        assert row["blocks"] == 2
        assert row["startup_seconds"] > 0
    assert {row["mode"] for row in first} == {"eager"}
    assert record["environment"]["torch"] == torch.__version__
    printed = capsys.readouterr().out
    assert "| ms per step | plain | plain + masks | fast | fast + masks | masks cost | over plain |" in printed


def test_the_time_limit_begins_nothing_new(step_time, tmp_path):
    record = step_time.main(_arguments(tmp_path / "r.json", "--time-limit", "0"))
    assert record["rows"] == []


def test_a_failure_is_recorded(step_time, tmp_path):
    record = step_time.main(_arguments(tmp_path / "r.json", "--variants", "fast", "--images", "0"))
    assert all("DataError" in row["error"] for row in record["rows"])


def test_a_record_of_other_settings_is_not_mixed_in(step_time, tmp_path):
    step_time.main(_arguments(tmp_path / "r.json", "--variants", "fast", "--images", "0"))
    with pytest.raises(SystemExit, match="give another --out"):
        step_time.main(_arguments(tmp_path / "r.json", "--images", "9"))
