"""Random crops, flips and erased rectangles."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from softprune.data import ArrayDataset, Augmentation
from softprune.data.batches import augmented_batch, image_words
from softprune.data.mixing import erased_pixels
from softprune.rng import Clock, uniform_noise


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (40, 3, 6, 9), dtype=torch.uint8, generator=generator)
    return ArrayDataset.from_arrays(images, torch.arange(40), mean=(100, 110, 120), std=(50, 60, 70))


def _clock(step=0, seed=0):
    clock = Clock(seed)
    clock.step.fill_(step)
    return clock


@pytest.mark.parametrize(("pad", "flip"), [(2, True), (4, False), (0, True)])
def test_is_pad_then_crop_then_flip_of_the_normalised_image(data, pad, flip):
    augmentation = Augmentation(pad=pad, flip=flip)
    indices = torch.arange(32)
    clock, words = _clock(step=5), image_words(0, 32)
    images, labels = augmented_batch(data, indices, augmentation, clock, words)
    assert torch.equal(labels, indices)
    rows, columns, flips = uniform_noise(clock, words)[:3]
    for number in range(32):
        plain = F.pad(data.batch(indices[number : number + 1])[0][0], (pad,) * 4)
        top, left = (int(u * (2 * pad + 1)) for u in (rows[number], columns[number]))
        expected = plain[:, top : top + 6, left : left + 9]
        if flip and flips[number] >= 0.5:
            expected = expected.flip(-1)
        assert torch.equal(images[number], expected), number


def test_without_augmentation_images_are_only_normalised(data):
    indices = torch.tensor([3, 1])
    images, _ = augmented_batch(data, indices, Augmentation(), _clock(), image_words(0, 2))
    assert torch.equal(images, data.batch(indices)[0])


def test_depends_on_seed_step_and_position_alone(data):
    indices = torch.zeros(16, dtype=torch.int64)
    augmentation = Augmentation(pad=3, flip=True)

    def batch(step, seed=0):
        torch.rand(step + 1)  # moves the global generator, which must not matter
        return augmented_batch(data, indices, augmentation, _clock(step, seed), image_words(seed, 16))[0]

    assert torch.equal(batch(4), batch(4))
    assert not torch.equal(batch(4), batch(5))
    assert not torch.equal(batch(4), batch(4, seed=1))
    assert len({tuple(image.flatten().tolist()) for image in batch(4)}) > 8


def test_half_a_batch_is_treated_as_in_the_whole(data):
    indices, words = torch.arange(16), image_words(0, 16)
    augmentation = Augmentation(pad=2, flip=True)
    whole = augmented_batch(data, indices, augmentation, _clock(), words)[0]
    half = augmented_batch(data, indices[8:], augmentation, _clock(), words[:, 8:])[0]
    assert torch.equal(whole[8:], half)


def test_all_shifts_and_flips_are_equally_likely():
    # The image holds its own coordinates, so that the crop tells where it comes from.
    plane = torch.arange(1, 26, dtype=torch.float32).view(1, 1, 5, 5)
    data = ArrayDataset.from_arrays(plane, [0])
    count = 9000
    images, _ = augmented_batch(
        data, torch.zeros(count, dtype=torch.int64), Augmentation(pad=1, flip=True), _clock(), image_words(0, count)
    )
    seen = {}
    for image in images:
        seen[tuple(image.flatten().tolist())] = seen.get(tuple(image.flatten().tolist()), 0) + 1
    assert len(seen) == 3 * 3 * 2
    assert all(abs(number - 500) < 110 for number in seen.values())  # five standard deviations


def test_erasing_sets_one_rectangle_of_some_images_to_the_mean_colour(data):
    count = 400
    indices, words = torch.arange(count) % 40, image_words(0, count)
    augmentation = Augmentation(pad=2, flip=True)
    whole = augmented_batch(data, indices, augmentation, _clock(), words)[0]
    erased = augmented_batch(data, indices, replace(augmentation, erasing=0.5), _clock(), words)[0]
    pixels = erased_pixels(uniform_noise(_clock(), words)[3:], 0.5, 6, 9)
    assert torch.equal(erased, torch.where(pixels[:, None], 0.0, whole))
    for image in pixels:
        rows, columns = image.any(1), image.any(0)
        assert torch.equal(image, rows[:, None] & columns)  # one rectangle, or nothing
        assert not image.any() or 0.01 * 54 <= image.sum() <= 0.45 * 54
    assert 150 <= pixels.flatten(1).any(1).sum() <= 250


def test_compiled(data):
    words = image_words(0, 8)
    arguments = (data, torch.arange(8), Augmentation(pad=2, flip=True, erasing=0.5), _clock(3), words)
    compiled = torch.compile(augmented_batch, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*arguments)[0], augmented_batch(*arguments)[0])
