"""Data sets by name, arrays, held-out images, and factories of the user's own."""

from pathlib import Path

import numpy as np
import pytest
import torch

from softprune.errors import ConfigError, DataError
from softprune.lab.data import ArrayDataset, Augmentation, load_data


def test_the_split_of_the_digits_is_fixed_and_spread_over_the_classes():
    bundle = load_data("digits")
    assert (len(bundle.train), len(bundle.test)) == (1437, 360)
    assert bundle.input_shape == tuple(bundle.train.images.shape[1:]) == (1, 8, 8)
    assert bundle.test.labels[:10].tolist() == [0, 5, 4, 9, 3, 8, 5, 9, 4, 5]
    assert bundle.test.labels.bincount(minlength=10).min() >= 30
    assert bundle.train.images.max() == 16
    assert bundle.num_classes == 10
    images, _ = bundle.train.batch(torch.arange(1437))
    assert abs(float(images.mean())) < 1e-4
    assert abs(float(images.std()) - 1) < 1e-3


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, Augmentation(pad=1)),  # never mirrored
        ({"erasing": 0.25}, Augmentation(pad=1, erasing=0.25)),
        ({"erasing": 0.25, "augment": False}, Augmentation()),
    ],
)
def test_augmentation_of_the_digits(options, expected):
    assert load_data("digits", **options).augmentation == expected


def test_held_out_images_are_a_fixed_part_of_the_training_set():
    whole, first = load_data("digits"), load_data("digits", holdout=200)
    again, other = load_data("digits", holdout=200), load_data("digits", holdout=200, seed=1)
    assert (len(first.train), len(first.holdout), len(first.test)) == (1237, 200, 360)
    assert torch.equal(first.holdout.images, again.holdout.images)
    assert not torch.equal(first.holdout.images, other.holdout.images)
    parts = torch.cat([first.train.images, first.holdout.images]).flatten(1)
    assert torch.equal(parts.sum(0), whole.train.images.flatten(1).sum(0))
    assert torch.equal(first.test.images, whole.test.images)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cifar-10", {}, "Did you mean 'cifar10'"),
        ("digits", {"holdout": 1437}, r"data\.holdout must leave at least one of the 1,437"),
        ("digits", {"options": {"fold": 2}}, r"for factories only .* Got {'fold': 2} for 'digits'"),
        ("own:data", {"in_memory": True}, r"data\.in_memory are for digits"),
        ("own:data", {"erasing": 0.5}, r"data\.erasing and"),
        ("folder", {}, "--data-dir"),
        ("cifar10", {"root": "nowhere"}, "Got a folder without data_batch_1"),
        ("./own_data.py:pair", {}, "module:factory"),
    ],
)
def test_what_cannot_be_loaded(name, options, message):
    with pytest.raises((DataError, ConfigError), match=message):
        load_data(name, **options)


@pytest.mark.parametrize("std", [2.0, torch.tensor([2.0, 2.0, 2.0]), np.full(3, 2)])
def test_one_number_is_the_mean_of_all_channels(std):
    data = ArrayDataset.from_arrays(torch.full((2, 3, 4, 4), 5.0), [0, 1], mean=1, std=std)
    assert data.std.shape == (3, 1, 1)
    assert torch.equal(data.batch(torch.tensor([1]))[0], torch.full((1, 3, 4, 4), 2.0))


@pytest.mark.parametrize(
    ("images", "labels", "constants"),
    [
        (torch.zeros(3, 1, 4, 4), [0, 1], {}),
        (torch.zeros(3, 4), [0, 1, 2], {}),
        (torch.zeros(3, 3, 4, 4), [0, 1, 2], {"std": (1.0, 0.0, 1.0)}),
        (torch.zeros(3, 3, 4, 4), [0, 1, 1.7], {}),
    ],
)
def test_wrong_arrays(images, labels, constants):
    with pytest.raises(DataError, match="Got"):
        ArrayDataset.from_arrays(images, labels, **constants)


_MODULE = """
import torch
from torch.utils.data import TensorDataset, random_split
from softprune.lab.data import ArrayDataset, Augmentation, DataBundle, load_data

class Images(TensorDataset):
    classes = ["cat", "dog", "cow"]

def made(count, channels=3, dtype=torch.uint8):
    images = torch.arange(count * channels * 64).view(count, channels, 8, 8) % 251
    return Images(images.to(dtype), torch.arange(count) % 3)

def pair(root, image_size):
    assert image_size == 32 and root.name == "files"
    return made(20), made(6)

def split():
    return random_split(made(8), [6, 2])

def sized(seed, *, count, **more):
    assert more == {"root": None, "image_size": 224, "augment": True, "fold": 2}
    return made(count), made(6)

def tensors(labels=(0, 1, 2, 3), side=5):
    return ArrayDataset.from_arrays(torch.zeros(4, 1, 5, side), labels)

def arrays():
    return tensors(), tensors()

def bundle():
    return changed()

def changed(**changes):
    parts = {"train": tensors(), "test": tensors()} | changes
    augmentation = Augmentation(flip=True)
    return DataBundle(num_classes=4, augmentation=augmentation, **parts)

def one():
    return made(4)

def rooted(root):
    return root / "train", root / "test"

def unnamed():
    return ([(torch.zeros(1, 5, 5), 1)] * 4,) * 2

def unequal():
    return made(4), made(4, 1)

def vast():
    return changed(train=tensors(labels=(3, 4, 5, 6)))

"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_own_data.py").write_text(_MODULE)


def test_a_pair_of_torch_data_sets(own):
    data = load_data("my_own_data:pair", Path("files"), image_size=32)
    assert (data.num_classes, data.class_names, data.input_shape) == (3, ("cat", "dog", "cow"), (3, 8, 8))
    assert (len(data.train), len(data.test)) == (20, 6)
    image, label = data.train[4, 0]
    assert torch.equal(image, data.train.dataset[4][0])
    assert label == 1
    held = load_data("my_own_data:pair", Path("files"), image_size=32, holdout=5)
    assert (len(held.train), len(held.holdout)) == (15, 5)


@pytest.mark.parametrize(
    ("factory", "options", "train", "classes"),
    [("split", {}, 6, 3), ("sized", {"count": 9, "fold": 2}, 9, 3), ("arrays", {}, 4, 4), ("bundle", {}, 4, 4)],
)
def test_what_a_factory_may_return(own, factory, options, train, classes):
    data = load_data(f"my_own_data:{factory}", options=options)
    assert (len(data.train), data.num_classes) == (train, classes)
    assert data.augmentation.flip == (factory == "bundle")
    assert not load_data(f"my_own_data:{factory}", options=options, augment=factory == "sized").augmentation.flip


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("one", r"must return two data sets"),
        ("rooted", r"TypeError: unsupported .* raised in line \d+ of .*my_own_data.py by .*\(root=None\)"),
        ("unnamed", "must have at least 2 classes"),
        ("unequal", r"the same shape\. Got \(3, 8, 8\) for `train` and \(1, 8, 8\)"),
        ("vast", r"Labels must be from 0 to 3, since there are 4 classes. Got 3 to 6 in `train`"),
        ("missing", "has no attribute 'missing'"),
    ],
)
def test_what_a_factory_must_not_return(own, factory, message):
    with pytest.raises((DataError, ConfigError), match=message):
        load_data(f"my_own_data:{factory}")
