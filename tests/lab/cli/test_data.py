"""`data NAME` reads every image of a data set."""

import json
from pathlib import Path

import pytest

Image = pytest.importorskip("PIL.Image", reason='the "vision" extra is not installed')


@pytest.mark.parametrize("workers", [0, 1])
def test_all_images_that_cannot_be_read_are_listed(
    softprune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr("softprune.lab.data.loader._at_most_cores", lambda _: workers)
    for split in ("train", "val"):
        for name in ("ant", "bee"):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for number in range(40):
                Image.new("RGB", (12, 9), (number, 0, 0)).save(folder / f"{number:02}.png")
    good = softprune("data", "folder", "--data-dir", "images")
    assert good.exit_code == 0, good.output
    assert good.output == "All 160 images of 2 classes can be read.\n"
    paths = [Path("images", each) for each in ("train/ant/03.png", "train/bee/39.png", "val/ant/00.png")]
    for path, size in zip(paths, (50, 0, 20), strict=True):
        path.write_bytes(path.read_bytes()[:size])
    bad = softprune("data", "folder", "--data-dir", "images", "--json")
    assert bad.exit_code == 2
    assert [row["image"] for row in json.loads(bad.stdout)] == [str(path) for path in paths]
    assert json.loads(bad.stdout)[1]["reason"].startswith("it is not an image that can be read")
    assert "Got 3 of 160 that are not" in bad.stderr


def test_data_in_memory_and_what_is_missing(softprune) -> None:
    assert softprune("data", "digits").output == "All 1,797 images of 10 classes can be read.\n"
    assert "must come with the name of a data set" in softprune("data", "--data-dir", "images").stderr
    assert softprune("data", "folder").exit_code == 2
