"""`predict`."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

import softprune as sp
from softprune.lab.cli.opened import open_images
from softprune.lab.config.recipes import load_recipe
from softprune.lab.data import ArrayDataset, DataBundle, load_data, open_data
from softprune.lab.runs.networks import build_network, inputs_of

Image = pytest.importorskip("PIL.Image", reason='the "vision" extra is not installed')
OWN = ("--model", "tiny_networks:tiny")


def test_predict_agrees_with_the_labels(softprune, finished: Path, tmp_path: Path) -> None:
    test = load_data("digits").test
    labels = []
    for index in range(20):
        Image.fromarray((test.images[index, 0] * (255 / 16)).byte().numpy()).save(f"{index}.png")
        labels.append(str(int(test.labels[index])))
    result = softprune("predict", str(finished), *OWN, *(f"{index}.png" for index in range(20)), "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    right = sum(row["classes"][0]["class"] == label for row, label in zip(found, labels, strict=True))
    network = sp.load(finished / "compact.safetensors", build_network("tiny_networks:tiny", 10)).eval()
    expected = network(test.batch(torch.arange(20))[0]).argmax(1)
    assert right == int((expected == test.labels[:20]).sum())
    table = softprune("predict", str(finished), *OWN, "0.png")
    assert found[0]["classes"][0]["class"] in table.output
    (tmp_path / "text.png").write_text("no image")
    Image.new("RGB", (8, 8)).save("page.png", format="EPS")  # whose decoder starts another program
    for name in ("text.png", "page.png"):
        bad = softprune("predict", str(finished), *OWN, name)
        assert bad.exit_code == 2
        assert name in bad.stderr


def test_names_that_are_no_utf8(softprune, finished: Path, tmp_path: Path) -> None:
    folder = os.fsdecode(b"\xff")
    shutil.copytree(finished, tmp_path / folder)
    Image.new("L", (8, 8)).save(tmp_path / folder / "a.png")
    assert r"\udcff/a.png" in softprune("predict", folder, *OWN, f"{folder}/a.png").output


def test_predict_needs_no_data_set_and_has_the_classes_of_training(softprune, finished: Path, tmp_path: Path) -> None:
    """A class that is added to the folder of images afterwards would move the names of all others."""
    run = shutil.copytree(finished, tmp_path / "run")
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace('name = "digits"', 'name = "gone:data"'))
    record = json.loads((run / "result.json").read_text())
    record["inputs"]["classes"] = [f"class {number}" for number in range(10)]
    (run / "result.json").write_text(json.dumps(record))
    Path("images/deeper").mkdir(parents=True)
    for name in ("a.png", "deeper/b.png"):
        Image.new("L", (9, 7), 200).save(f"images/{name}")
    found = softprune("predict", "run", *OWN, "images", "images/a.png", "--json")
    assert found.exit_code == 0, found.output
    rows = json.loads(found.output)
    assert [row["image"] for row in rows] == ["images/a.png", "images/deeper/b.png", "images/a.png"]
    assert {row["classes"][0]["class"][:6] for row in rows} == {"class "}
    (run / "result.json").write_text(json.dumps(record | {"inputs": None}))
    assert "with floats" in " ".join(softprune("predict", "run", *OWN, "images").stderr.split())


@pytest.mark.parametrize("settings", [[], ["data.in_memory=true"]])
def test_inputs_are_those_of_the_evaluation(tmp_path: Path, settings: list[str]) -> None:
    chance = torch.Generator().manual_seed(0)
    for split in ("train", "val"):
        for name in ("ant", "b\ne\udcff"):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            pixels = torch.randint(200, (24, 32, 3), dtype=torch.uint8, generator=chance)
            Image.fromarray(pixels.numpy()).save(folder / "0.png")
    files = ["data.name=folder", f"data.dir={tmp_path}", "data.image_size=16", "data.workers=0"]
    config = load_recipe("digits", [*files, *settings])
    data = open_data(config.data, config.seed, "cpu")
    inputs = inputs_of(data, config)
    assert inputs.classes == ("ant", "b\ufffde\ufffd")  # a record has no control characters
    if isinstance(data.test, ArrayDataset):
        expected = data.test.batch(torch.tensor([0]))[0]
    else:
        expected = (data.test[0, 0][0].float() - data.test.mean) / data.test.std
    ((_, found),) = open_images([tmp_path / "val/ant/0.png"], inputs)
    torch.testing.assert_close(found, expected.view(1, 3, 16, 16))


def test_arrays_are_in_memory_anyway() -> None:
    configs = [load_recipe("digits", settings) for settings in ([], ["data.in_memory=true"])]
    first, second = (inputs_of(open_data(config.data, config.seed, "cpu"), config) for config in configs)
    assert first == second


@pytest.mark.parametrize(("low", "high", "is_known"), [(0, 1, True), (-1, 1, False), (0, 0, False)])
def test_inputs_of_arrays(low: float, high: float, is_known: bool) -> None:
    images = torch.linspace(low, high, 32).view(2, 1, 4, 4)
    part = ArrayDataset.from_arrays(images, [0, 1], mean=0.5, std=0.25)
    data = DataBundle(train=part, test=part, num_classes=2)
    inputs = inputs_of(data, load_recipe("digits", []))
    assert (inputs is not None) == is_known
    if inputs is not None:
        assert (inputs.crop, inputs.mean, inputs.std, inputs.classes) == (False, (127.5,), (63.75,), ("0", "1"))
