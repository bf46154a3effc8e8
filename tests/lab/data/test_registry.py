"""Data sets by name, and arrays of one's own."""

import numpy as np
import pytest
import torch

from softprune.errors import DataError
from softprune.lab.data import DATASETS, ArrayDataset, Augmentation, load_data


def test_unknown_name_suggests_a_near_one():
    with pytest.raises(DataError, match="Did you mean 'cifar10'"):
        load_data("cifar-10")


def test_every_entry_has_a_description():
    assert set(DATASETS) == {"digits", "cifar10", "cifar100", "folder", "webdataset", "huggingface"}
    assert all(entry.description for entry in DATASETS.values())


def test_an_entry_knows_its_images():
    digits = load_data("digits")
    entry = DATASETS["digits"]
    assert (entry.input_shape, entry.num_classes) == (digits.input_shape, digits.num_classes)
    assert DATASETS["cifar100"].num_classes == 10 * DATASETS["cifar10"].num_classes == 100
    assert DATASETS["folder"].num_classes is None


def test_own_arrays():
    data = ArrayDataset.from_arrays(np.full((3, 5, 5), 9, np.uint8), [0, 1, 2], mean=(8,), std=(2,))
    images, labels = data.batch(torch.tensor([2, 0]))
    assert torch.equal(images, torch.full((2, 1, 5, 5), 0.5))
    assert labels.tolist() == [2, 0]


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
        (torch.zeros(3, 3, 4, 4), [0, 1, 2], {"mean": (1.0,)}),
        (torch.zeros(3, 3, 4, 4), [0, 1, 2], {"mean": None}),
        (torch.zeros(3, 3, 4, 4), [0, 1, 2], {"std": (1.0, 0.0, 1.0)}),
        (torch.zeros(3, 3, 4, 4), ["cat", "cat", "dog"], {}),
        (None, [0, 1, 2], {}),
    ],
)
def test_wrong_arrays(images, labels, constants):
    with pytest.raises(DataError, match="Got"):
        ArrayDataset.from_arrays(images, labels, **constants)


def test_wrong_augmentation():
    with pytest.raises(DataError, match="0 or more"):
        Augmentation(pad=-1)
    with pytest.raises(DataError, match=r"from 0 to 1\. Got 1\.5"):
        Augmentation(erasing=1.5)


def test_erasing_is_part_of_the_augmentation_and_not_of_an_own_data_set():
    assert load_data("digits", erasing=0.25).augmentation.erasing == 0.25
    assert load_data("digits", erasing=0.25, augment=False).augmentation == Augmentation()
    with pytest.raises(DataError, match=r"data\.erasing needs one of.*own data set"):
        load_data("module:factory", erasing=0.25)
