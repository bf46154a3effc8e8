"""Images that cannot be read in the middle of a run: the message names them, and after a repair the run resumes."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import assert_same, final_state, metrics

from softprune.errors import DataError
from softprune.lab.config.settings import RunConfig
from softprune.lab.train.control import Listener
from softprune.lab.train.run import resume, start

Image = pytest.importorskip("PIL.Image", reason='the "vision" extra is not installed')


class Break(Listener):
    """Tears the images of a split once a phase or a step has come."""

    def __init__(self, images: Path, split: str, step: int, phase: str) -> None:
        self.files = {path: path.read_bytes() for path in (images / split).glob("*/*.png")}
        self.steps, self.phase = step, phase

    def on_step(self, done: int) -> None:
        self.steps -= 1
        if self.steps == 0:
            self.tear()

    def on_phase(self, text: str) -> None:
        if self.phase and self.phase in text:
            self.tear()

    def tear(self) -> None:
        for path, content in self.files.items():
            path.write_bytes(content[:60])


@pytest.mark.parametrize(
    ("overrides", "split", "step", "phase"),
    [(("data.workers=1",), "train", 6, ""), ((), "val", 0, "measuring")],
    ids=["worker", "finish"],
)
def test_a_repaired_run_ends_as_if_its_images_had_always_been_whole(
    tiny: Callable[..., RunConfig], tmp_path: Path, overrides: tuple[str, ...], split: str, step: int, phase: str
) -> None:
    generator, images = torch.Generator().manual_seed(0), tmp_path / "images"
    for part, count in {"train": 16, "val": 3}.items():
        for label, name in enumerate(("ant", "bee")):
            (images / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = torch.randint(100, (20, 20, 3), generator=generator, dtype=torch.uint8)
                pixels[..., label] += 100
                Image.fromarray(pixels.numpy()).save(images / part / name / f"{i}.png")
    files = ("data.name=folder", f"data.dir={images}", "data.image_size=8", "data.batch_size=8", "data.workers=0")
    config = tiny("model.options.channels=3", "method.strength=0.5", *files, *overrides)
    start(config, tmp_path / "whole")
    broken = Break(images, split, step, phase)
    with pytest.raises(DataError) as caught:
        start(config, tmp_path / "run", listener=broken)
    assert re.search(rf"Got an error in {images}/{split}/\w+/\d+\.png: .*Replace the image", str(caught.value))
    for path, content in broken.files.items():
        path.write_bytes(content)
    assert resume(tmp_path / "run").result is not None
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert_same(final_state(tmp_path / "run"), final_state(tmp_path / "whole"))
