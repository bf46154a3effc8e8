"""Training images that are left out of training."""

import pytest
import torch

from softprune.errors import DataError
from softprune.lab.data import load_data


def test_held_out_images_are_a_fixed_part_of_the_training_set():
    whole, first = load_data("digits"), load_data("digits", holdout=200)
    again, other = load_data("digits", holdout=200), load_data("digits", holdout=200, seed=1)
    assert (len(first.train), len(first.holdout), len(first.test)) == (1237, 200, 360)
    assert torch.equal(first.holdout.images, again.holdout.images)
    assert not torch.equal(first.holdout.images, other.holdout.images)
    parts = torch.cat([first.train.images, first.holdout.images]).flatten(1)
    assert torch.equal(parts.sum(0), whole.train.images.flatten(1).sum(0))
    assert torch.equal(first.test.images, whole.test.images)


@pytest.mark.parametrize("count", [1437, 5000])
def test_some_images_must_be_left(count):
    with pytest.raises(DataError, match=r"data\.holdout must leave at least one of the 1,437"):
        load_data("digits", holdout=count)


def test_images_in_folders_are_held_out_without_augmentation(tmp_path):
    Image = pytest.importorskip("PIL.Image", reason='the "vision" extra is not installed')
    for split in ("train", "val"):
        for name in ("a", "b"):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(4):
                Image.new("RGB", (20, 20), (60 * i, 0, 0)).save(tmp_path / split / name / f"{i}.png")
    data = load_data("folder", tmp_path, image_size=8, holdout=3)
    assert (len(data.train), len(data.holdout)) == (5, 3)
    assert data.train.crops.augment
    assert not data.holdout.crops.augment
    files = [part.path(i) for part in (data.train, data.holdout) for i in range(len(part))]
    assert len(set(files)) == 8
