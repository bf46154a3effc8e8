"""`inspect`, `compact`, `evaluate`."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_files import rewrite

import softprune as sp
from softprune import models
from softprune.cut import Origin, read_origin, read_plans, save
from softprune.lab.config.recipes import load_recipe
from softprune.lab.runs.folder import RunFolder
from softprune.methods import Pruner

OWN = ("--model", "tiny_networks:tiny")
"""The network of the tiny run, whose folder alone may not name code."""


def test_inspect_a_network_from_the_registry_and_ones_own(softprune) -> None:
    result = softprune("inspect", "digits_net")
    assert result.exit_code == 0
    assert "stages.0.0.bn" in result.output
    own = softprune("inspect", "tiny_networks:tiny", "--input", "1x8x8")
    assert own.exit_code == 0
    assert "relu" in own.output


def test_inspect_with_globs(softprune) -> None:
    assert ", 0 frozen" in softprune("inspect", "resnet20").output
    chosen = softprune(
        "inspect", "resnet20", "--include", "stages.1.*", "--include", "stages.2.*", "--exclude", "*.bn1"
    )
    assert chosen.exit_code == 0
    sites = [line.split()[0] for line in chosen.output.splitlines() if "site, relu" in line]
    assert sites == [f"stages.{stage}.{block}.bn2" for stage in (1, 2) for block in range(3)]
    unknown = softprune("inspect", "resnet20", "--include", "nowhere.*")
    assert unknown.exit_code == 2
    assert "nowhere.*" in unknown.stderr


def test_inspect_a_run(softprune, finished: Path, tmp_path: Path) -> None:
    name, *found = softprune("inspect", str(finished), *OWN).output.splitlines()
    assert name.startswith("tiny_networks:tiny")
    assert found == softprune("inspect", "tiny_networks:tiny", "--input", "1x8x8").output.splitlines()
    own = shutil.copytree(finished, tmp_path / "own")  # its data are the user's: the compact network has their shape
    text = (own / "config.toml").read_text()
    (own / "config.toml").write_text(text.replace('name = "digits"', 'name = "mine:images"', 1))
    assert softprune("inspect", "own", *OWN).output.splitlines()[1:] == found
    assert softprune("export", "own", *OWN).exit_code == 0
    run = tmp_path / "unfinished"
    run.mkdir()
    text = '[model]\nname = "resnet18"\n[data]\nname = "folder"\nimage_size = 64\n[method]\nexclude = ["layer*"]\n'
    (run / "config.toml").write_text(text + "[records]\n")
    unknown = softprune("inspect", "unfinished")
    assert unknown.exit_code == 2
    assert "--num-classes" in unknown.stderr
    told = softprune("inspect", "unfinished", "--num-classes", "5")
    assert told.exit_code == 0, told.output
    whole = softprune("inspect", "resnet18", "--num-classes", "5", "--input", "3x64x64")
    assert len(told.output.splitlines()) == 1 + len(whole.output.splitlines())
    assert told.output.count(" site, ") < whole.output.count(" site, ")
    (run / "config.toml").unlink()
    neither = softprune("inspect", "unfinished")
    assert neither.exit_code == 2
    assert "config.toml" in neither.stderr


def test_inspect_takes_shape_and_classes_from_the_data_as_train_does(softprune, tmp_path: Path) -> None:
    (tmp_path / "own_images.py").write_text(
        "import torch\nfrom softprune.lab.data import ArrayDataset\n"
        "def images(image_size):\n"
        "    constants = torch.zeros(1, 1, 1), torch.ones(1, 1, 1)\n"
        "    part = ArrayDataset(torch.zeros(8, 1, image_size, image_size), torch.arange(8) % 4, *constants)\n"
        "    return part, part\n"
    )
    own = ("--data", "own_images:images", "--set", "data.image_size=8")
    expected = softprune("inspect", "tiny_networks:tiny", "--input", "1x8x8", "--num-classes", "4").output
    for named in (("tiny_networks:tiny",), OWN):
        found = softprune("inspect", *named, *own)
        assert found.exit_code == 0, found.stderr
        assert found.output == expected
    assert (
        softprune("inspect", *OWN, "--data", "digits").output == softprune("inspect", *OWN, "--input", "1x8x8").output
    )
    renamed = softprune("inspect", "resnet20", "--set", "model.name=digits_net")
    assert renamed.output == softprune("inspect", "digits_net").output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("vgg61",), "Did you mean"),
        (("runs/gone",), "module:factory of your own, or the folder of a run. Got 'runs/gone'"),
        (("tiny_networks:tiny",), "--input 3x224x224"),
        (("tiny_networks:tiny", "--data-dir", "images"), "--data-dir images must come with --data"),
        (("resnet20", "--set", "data.name=cifar100"), "--set data.name=cifar100 must come with --data"),
        (("digits_net", "--model", "tiny_networks:tiny"), "--model must come alone or with the folder of a run"),
        (("tiny_networks:tiny", "--input", "8x8"), "--input must be CHANNELSxHEIGHTxWIDTH"),
    ],
)
def test_inspect_mistakes(softprune, arguments: tuple[str, ...], message: str) -> None:
    result = softprune("inspect", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_evaluate_agrees_with_the_run(softprune, finished: Path) -> None:
    last = json.loads((finished / "result.json").read_text())["last"]
    result = softprune("evaluate", str(finished), *OWN)
    assert result.exit_code == 0, result.output
    rows = {line.split()[0]: line.split() for line in result.output.splitlines()[1:]}
    assert float(rows["masked"][1]) == float(rows["compact"][1]) == round(last["top1"], 2)
    compact = softprune("evaluate", str(finished / "compact.safetensors"), *OWN)
    assert compact.output.splitlines()[1].split() == rows["compact"]


def test_a_compact_network_elsewhere_knows_a_network_of_the_registry(softprune, tmp_path: Path) -> None:
    dense = models.build("digits_net", 10)
    pruner = sp.SoftPruner(dense, torch.randn(2, 1, 8, 8))
    save(pruner.compact(), tmp_path / "small", origin=Origin("digits_net", "digits", (1, 8, 8)))
    for command in (("evaluate",), ("export",), ("bench", "--batch", "1", "--repeats", "1")):
        result = softprune(command[0], "small", *command[1:])
        assert result.exit_code == 0, result.output
    assert read_origin(tmp_path / "small") == Origin("digits_net", "digits", (1, 8, 8))


def test_a_file_does_not_choose_how_much_memory_is_used(softprune, tmp_path: Path) -> None:
    pruner = sp.SoftPruner(models.build("digits_net", 10), torch.randn(2, 1, 8, 8))
    file = save(pruner.compact(), tmp_path / "small", origin=Origin("digits_net", "digits", (1, 8, 8)))
    whole = file.read_bytes()

    def many_classes(document: dict[str, Any], count: int) -> None:
        """Ask for many classes in the plan: those layers of the plan that name every channel must go."""
        plan = document["plans"][0]
        body = plan["plan"]
        for name, shape in body["dense"].items():
            if name.startswith("classifier."):
                shape[0] = count
        body["modules"] = {name: cut for name, cut in body["modules"].items() if name != "classifier"}
        text = json.dumps(body, separators=(",", ":"), sort_keys=True)
        plan["sha256"] = hashlib.sha256(text.encode()).hexdigest()

    for count, says in ((10**9, "at most 1,000,000 classes"), (900_000, "weights must fit the plan")):
        file.write_bytes(whole)
        rewrite(file, lambda document, count=count: many_classes(document, count))
        for command in (("export",), ("bench",)):
            result = softprune(command[0], "small", *command[1:])
            assert result.exit_code == 2
            assert says in " ".join(result.stderr.split())
    file.write_bytes(whole)
    rewrite(file, lambda document: document["origin"].update(input_shape=[1, 200_000, 200_000]))
    for command in (("export",), ("bench",), ("evaluate",)):
        result = softprune(command[0], "small", *command[1:])
        assert result.exit_code == 2
        assert "at most 4,194,304 numbers. Got [1, 200000, 200000]" in " ".join(result.stderr.split())


@pytest.mark.parametrize("command", ["inspect", "export", "bench"])
def test_a_run_does_not_choose_how_much_memory_is_used(softprune, tmp_path: Path, command: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "compact.safetensors").touch()
    options = {"data.image_size": 200_000, "train.threads": 10**9, "data.workers": 10**9}
    for key, value in options.items():
        section, name = key.split(".")
        (run / "config.toml").write_text(f"[{section}]\n{name} = {value}\n[records]\n")
        result = softprune(command, "run")
        assert result.exit_code == 2
        assert f"{key} must be a whole number, at least" in " ".join(result.stderr.split())
    (run / "config.toml").write_text(
        '[model]\nname = "resnet50"\n[data]\nname = "folder"\nimage_size = 4096\n[records]\n'
    )
    result = softprune(command, "run", *(("--num-classes", "2") if command == "inspect" else ()))
    assert result.exit_code == 2
    assert "at most 4,194,304 numbers here. Got data.image_size = 4096" in " ".join(result.stderr.split())


def test_a_compact_network_elsewhere_needs_to_know_its_network(softprune, finished: Path, tmp_path: Path) -> None:
    shutil.copy(finished / "compact.safetensors", tmp_path / "small.safetensors")
    result = softprune("evaluate", "small")
    assert result.exit_code == 2
    assert "--model" in result.stderr
    result = softprune("evaluate", "small", "--model", "tiny_networks:tiny", "--data", "digits")
    assert result.exit_code == 0, result.output
    result = softprune("evaluate", "small", "--model", "digits_net", "--data", "digits")
    assert result.exit_code == 2
    assert softprune("evaluate", str(tmp_path)).exit_code == 2


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
    assert "`softprune resume run --model tiny_networks:tiny` trains it" in " ".join(result.stderr.split())


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
    scores = [
        softprune("evaluate", str(file), *where).output.splitlines()[1].split()[1:3]
        for file, where in (
            (finished / "compact.safetensors", OWN),
            (tmp_path / "eights", ("--model", "tiny_networks:tiny", "--data", "digits")),
        )
    ]
    assert scores[0] == scores[1]
    refused = softprune("compact", str(finished), *OWN, "--out", str(tmp_path / "no"), "--round-to", "0")
    assert refused.exit_code != 0
    assert not (tmp_path / "no.safetensors").exists()


def test_compact_passes_its_options(softprune, finished: Path, tmp_path: Path, monkeypatch) -> None:
    asked = {}
    cut = Pruner.compact

    def compact(self, model=None, **options):
        asked.update(options)
        return cut(self, model, **options)

    monkeypatch.setattr(Pruner, "compact", compact)
    softprune("compact", str(finished), *OWN, "--out", str(tmp_path / "a"), "--round-to", "4", "--no-gathers")
    assert asked == {"round_to": 4, "gathers": False}


def test_a_cut_of_another_kind_needs_a_file_of_its_own(softprune, finished: Path) -> None:
    before = (finished / "compact.safetensors").read_bytes()
    for option in (["--round-to", "8"], ["--no-gathers"]):
        result = softprune("compact", str(finished), *OWN, *option)
        assert result.exit_code == 2
        assert "--out" in result.stderr
    assert (finished / "compact.safetensors").read_bytes() == before


def test_compact_refuses_a_dense_run(softprune, finished: Path) -> None:
    result = softprune("compact", str(finished / "dense"), *OWN)
    assert result.exit_code == 2
    assert "Got the dense run" in result.stderr


def test_evaluate_a_dense_run(softprune, finished: Path) -> None:
    last = json.loads((finished / "dense" / "result.json").read_text())["last"]
    result = softprune("evaluate", str(finished / "dense"), *OWN)
    assert result.exit_code == 0, result.output
    (row,) = result.output.splitlines()[1:]
    assert row.split()[0] == "trained"
    assert float(row.split()[1]) == round(last["top1"], 2)


def test_facts_as_json(softprune, finished: Path) -> None:
    found = json.loads(softprune("inspect", str(finished), *OWN, "--json").output)
    assert found["network"] == "tiny_networks:tiny"
    assert found["floor_macs"] < found["macs"]
    assert {site["activation"] for site in found["sites"]} == {"relu"}
    rows = json.loads(softprune("evaluate", str(finished), *OWN, "--json").output)
    assert [row["network"] for row in rows] == ["masked", "compact"]


@pytest.mark.parametrize("command", ["inspect", "evaluate", "export", "bench", "compact", "resume", "predict"])
def test_code_that_only_a_run_names_is_not_imported(softprune, tmp_path: Path, command: str) -> None:
    (tmp_path / "helper.py").write_text("from pathlib import Path\nPath('imported').touch()\nmake = None\n")
    run = tmp_path / "run"
    run.mkdir()
    (run / "compact.safetensors").touch()
    more = ("image.png",) if command == "predict" else ()
    imports = {"model"} | ({"data"} if command in ("evaluate", "compact", "resume", "predict") else set())
    for section in imports | ({"method"} if command in ("evaluate", "compact", "resume") else set()):
        (run / "config.toml").write_text(f'[{section}]\nname = "helper:make"\n[records]\n')
        result = softprune(command, "run", *more)
        assert result.exit_code == 2
        assert f"add `--{section} helper:make`" in " ".join(result.stderr.split())
        assert not (tmp_path / "imported").exists()
