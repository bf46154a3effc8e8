"""`inspect`, `compact`, `evaluate`, `export` and `bench`."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import softprune as sp
from softprune import models
from softprune.cut import Origin, read_origin, read_plans, save
from softprune.lab.config.recipes import load_recipe
from softprune.lab.runs.folder import RunFolder
from softprune.lab.runs.networks import build_network

OWN = ("--model", "tiny_networks:tiny")
"""The network of the tiny run, whose folder alone may not name code."""


def test_inspect_a_network_from_the_registry_and_ones_own(softprune) -> None:
    result = softprune("inspect", "digits_net")
    assert result.exit_code == 0
    assert "stages.0.0.bn" in result.output
    own = softprune("inspect", "tiny_networks:tiny", "--input", "1x8x8")
    assert own.exit_code == 0
    assert "relu" in own.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("inspect vgg61", "Did you mean"),
        (f"report {5000 * '1'}", "Choose another path"),
        ("inspect tiny_networks:tiny", "--input 3x224x224"),
        ("inspect tiny_networks:tiny --input 8x8", "--input must be CHANNELSxHEIGHTxWIDTH"),
        ("export nowhere", "compact.safetensors"),
        ("bench nowhere --batch one", "--batch must be integers"),
        ("evaluate small", "config.toml"),
        ("export small", "--model"),
        ("export small --model vgg16", "must be the one that was pruned"),
        ("export DENSE --model tiny_networks:tiny", "a dense run has no compact network"),
        ("compact DENSE --model tiny_networks:tiny", "plan"),
        ("compact RUN --model tiny_networks:tiny --round-to 8", "--out"),
        ("bench RUN --model tiny_networks:tiny --device cuda:99", "--device"),
    ],
)
def test_mistakes_end_in_a_message(softprune, finished: Path, tmp_path: Path, arguments: str, message: str) -> None:
    shutil.copy(finished / "compact.safetensors", tmp_path / "small.safetensors")
    names = {"RUN": str(finished), "DENSE": str(finished / "dense")}
    result = softprune(*(names.get(word, word) for word in arguments.split()))
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("inspect tiny_networks:tiny --input 1x8x8", {"network", "macs", "floor_macs", "sites", "frozen"}),
        ("compact RUN --out small --model tiny_networks:tiny", {"file", "dense", "compact"}),
        ("export RUN --out small.onnx --model tiny_networks:tiny", {"path", "bytes", "max_difference"}),
        ("bench RUN --batch 1 --repeats 2 --model tiny_networks:tiny", {"rows", "dense_macs", "environment"}),
    ],
)
def test_json_is_all_that_is_printed(softprune, finished: Path, arguments: str, expected: set[str]) -> None:
    result = softprune(*arguments.replace("RUN", str(finished)).split(), "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert expected <= set(found)
    if "compact" in found:
        assert found["compact"]["activations"] < found["dense"]["activations"]


def test_bench_prints_a_row_for_each_batch_size(softprune, finished: Path) -> None:
    result = softprune("bench", str(finished), *OWN, "--batch", "1,2", "--repeats", "2", "--threads", "1")
    assert result.exit_code == 0, result.output
    assert len([line for line in result.output.splitlines() if line.startswith("eager")]) == 2


def test_evaluate_agrees_with_the_run(softprune, finished: Path) -> None:
    last = json.loads((finished / "result.json").read_text())["last"]
    result = softprune("evaluate", str(finished), *OWN)
    assert result.exit_code == 0, result.output
    rows = {line.split()[0]: line.split() for line in result.output.splitlines()[1:]}
    assert float(rows["masked"][1]) == float(rows["compact"][1]) == round(last["top1"], 2)


def test_a_compact_network_elsewhere_knows_a_network_of_the_registry(softprune, tmp_path: Path) -> None:
    dense = models.build("digits_net", 10)
    pruner = sp.SoftPruner(dense, torch.randn(2, 1, 8, 8))
    save(pruner.compact(), tmp_path / "small", origin=Origin("digits_net", "digits", (1, 8, 8)))
    for command in (("export",), ("bench", "--batch", "1", "--repeats", "1")):
        result = softprune(command[0], "small", *command[1:])
        assert result.exit_code == 0, result.output
    assert read_origin(tmp_path / "small") == Origin("digits_net", "digits", (1, 8, 8))


def test_compact_cuts_an_unfinished_run(softprune, tmp_path: Path) -> None:
    assert softprune("train", "tiny.toml", "--out", "run", "--time-limit", "0").exit_code == 75
    result = softprune("compact", "run", *OWN, "--out", "small")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "small.safetensors").is_file()
    assert not (tmp_path / "run" / "compact.safetensors").exists()


def test_compact_of_a_run_without_a_checkpoint_says_how_to_continue(softprune, tmp_path: Path) -> None:
    RunFolder.create("run", load_recipe("tiny.toml"))
    result = softprune("compact", "run", *OWN)
    assert result.exit_code == 2
    assert "`softprune resume run --model tiny_networks:tiny`" in " ".join(result.stderr.split())


def test_compact_takes_multiples_and_leaves_gathers_out(softprune, finished: Path, tmp_path: Path) -> None:
    result = softprune(
        "compact", str(finished), *OWN, "--out", str(tmp_path / "eights"), "--round-to", "8", "--no-gathers"
    )
    assert result.exit_code == 0
    plan = read_plans(tmp_path / "eights")[0]
    usual = read_plans(finished / "compact.safetensors")[0]
    assert plan.sites == usual.sites
    assert plan.macs >= usual.macs
    for cut in plan.modules.values():
        assert cut.select is None
        assert len(cut.outputs) % 8 == 0 or len(cut.outputs) == cut.width_out
    first, second = (
        sp.load(file, build_network("tiny_networks:tiny", 10)).eval()(torch.ones(2, 1, 8, 8))
        for file in (finished / "compact.safetensors", tmp_path / "eights")
    )
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize("command", ["evaluate", "export", "bench", "compact", "resume"])
def test_code_that_only_a_run_names_is_not_imported(softprune, tmp_path: Path, command: str) -> None:
    (tmp_path / "helper.py").write_text("from pathlib import Path\nPath('imported').touch()\nmake = None\n")
    run = tmp_path / "run"
    run.mkdir()
    (run / "compact.safetensors").touch()
    for section in {"model"} | ({"data", "method"} if command in ("evaluate", "compact", "resume") else set()):
        (run / "config.toml").write_text(f'[{section}]\nname = "helper:make"\n[records]\n')
        result = softprune(command, "run")
        assert result.exit_code == 2
        assert f"add `--{section} helper:make`" in " ".join(result.stderr.split())
        assert not (tmp_path / "imported").exists()
