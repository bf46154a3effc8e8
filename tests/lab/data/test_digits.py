"""The embedded digits."""

import torch

from softprune.lab.data import load_data


def test_split_is_fixed_and_spread_over_the_classes():
    bundle = load_data("digits")
    assert (len(bundle.train), len(bundle.test)) == (1437, 360)
    assert bundle.input_shape == tuple(bundle.train.images.shape[1:]) == (1, 8, 8)
    assert bundle.test.labels[:10].tolist() == [0, 5, 4, 9, 3, 8, 5, 9, 4, 5]
    assert bundle.test.labels.bincount(minlength=10).min() >= 30
    assert bundle.train.images.max() == 16


def test_training_images_are_normalised_to_zero_mean_and_unit_deviation():
    train = load_data("digits").train
    images, labels = train.batch(torch.arange(len(train)))
    assert abs(float(images.mean())) < 1e-4
    assert abs(float(images.std()) - 1) < 1e-3
    assert torch.equal(labels, train.labels)


def test_digits_are_never_mirrored():
    assert not load_data("digits").augmentation.flip
    assert load_data("digits", augment=False).augmentation.pad == 0
