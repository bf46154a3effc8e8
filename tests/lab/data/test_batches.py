"""The order of the images, their augmentation, and where batches come from."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from softprune.errors import ConfigError
from softprune.lab.data import ArrayDataset, Augmentation, DataBundle, load_data
from softprune.lab.data.augment import erased_pixels
from softprune.lab.data.batches import (
    ArrayBatches,
    EpochSampler,
    LoaderBatches,
    augmented_batch,
    image_words,
    make_batches,
)
from softprune.rng import Clock, uniform_noise

CPU = torch.device("cpu")


def _arrays(augmentation=None):
    images = torch.arange(20 * 16, dtype=torch.float32).view(20, 1, 4, 4)
    data = ArrayDataset.from_arrays(images, torch.arange(20) % 3)
    return DataBundle(
        name="own",
        num_classes=3,
        input_shape=(1, 4, 4),
        train=data,
        test=data,
        augmentation=augmentation or Augmentation(),
    )


def _batch(batches, position, clock):
    batches.before_step()
    pieces = [batches.batch(*micro_batch, clock) for micro_batch in batches.micro_batches(torch.tensor([position]))]
    return torch.cat([images for images, _ in pieces]), torch.cat([labels for _, labels in pieces])


def test_batches_follow_the_sampler():
    bundle = _arrays()
    sampler = EpochSampler(size=20, batch_size=6)
    batches = make_batches(bundle, sampler, device=CPU)
    assert isinstance(batches, ArrayBatches)
    batches.begin(2, 0)
    for position in (0, 3):
        images, labels = _batch(batches, position, Clock())
        expected = sampler.indices(2)[position]
        assert torch.equal(images, bundle.train.images[expected])
        assert torch.equal(labels, bundle.train.labels[expected])
        assert batches.indices(position) == expected.tolist()


def test_micro_batches_and_processes_see_the_same_augmented_images():
    bundle = _arrays(Augmentation(pad=1, flip=True))
    clock = Clock()
    clock.step.fill_(9)

    def epoch_batch(pieces=1, rank=0, world_size=1):
        sampler = EpochSampler(size=20, batch_size=8, rank=rank, world_size=world_size)
        batches = make_batches(bundle, sampler, device=CPU, accumulate=pieces)
        batches.begin(0, 0)
        return _batch(batches, 1, clock)[0]

    whole = epoch_batch()
    assert torch.equal(epoch_batch(pieces=4), whole)
    assert torch.equal(torch.cat([epoch_batch(rank=rank, world_size=2) for rank in range(2)]), whole)


def test_micro_batches_must_be_equal():
    with pytest.raises(ConfigError, match="equal micro-batches"):
        make_batches(_arrays(), EpochSampler(size=20, batch_size=6), device=CPU, accumulate=4)


def test_images_from_folders(tmp_path):
    Image = pytest.importorskip("PIL.Image", reason='the "vision" extra is not installed')
    for split in ("train", "val"):
        for name in ("ant", "bee"):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(3):
                colour = (80 * i, 10, 20 if name == "ant" else 200)
                Image.new("RGB", (20, 20), colour).save(tmp_path / split / name / f"{i}.png")
    bundle = load_data("folder", tmp_path, image_size=8)
    sampler = EpochSampler(size=6, batch_size=2)
    batches = make_batches(bundle, sampler, device=CPU, accumulate=2)
    assert isinstance(batches, LoaderBatches)
    batches.begin(1, 1)
    images, labels = _batch(batches, 1, Clock())
    expected = sampler.indices(1)[1]
    assert torch.equal(labels, bundle.train.labels[expected])
    red = torch.tensor([80.0 * (int(index) % 3) for index in expected])
    assert torch.allclose(images[:, 0, 0, 0], (red - 123.675) / 58.395)
    assert batches.indices(1) == expected.tolist()


def test_the_authors_epoch_has_782_full_batches():
    sampler = EpochSampler(size=50_000, batch_size=64)
    assert sampler.steps == 782
    indices = sampler.indices(0)
    assert indices.shape == (782, 64)
    assert len(indices.flatten().unique()) == 50_000
    # The second epoch goes on where the first one stopped, 48 images into the second permutation.
    assert torch.equal(sampler.indices(1).flatten()[: 50_000 - 48], sampler.permutation(1)[48:])


@pytest.mark.parametrize(("size", "batch"), [(10, 4), (10, 5), (3, 8), (7, 1)])
def test_epochs_are_cut_from_an_endless_row_of_permutations(size, batch):
    sampler = EpochSampler(size=size, batch_size=batch, seed=3)
    row = torch.cat([sampler.indices(epoch).flatten() for epoch in range(12)])
    whole = len(row) // size
    for number, part in enumerate(row[: whole * size].view(whole, size)):
        assert torch.equal(part, sampler.permutation(number))
        assert torch.equal(part.sort().values, torch.arange(size))


def test_depends_on_seed_and_epoch_alone():
    one = EpochSampler(size=100, batch_size=10, seed=1)
    first = one.indices(3)
    torch.rand(5)
    assert torch.equal(first, EpochSampler(size=100, batch_size=10, seed=1).indices(3))
    assert not torch.equal(first, one.indices(4))
    assert not torch.equal(first, EpochSampler(size=100, batch_size=10, seed=2).indices(3))


@pytest.mark.parametrize(("size", "batch"), [(10, 4), (3, 8), (7, 1)])
def test_a_queue_is_a_buffer_that_is_refilled_in_order(size, batch):
    sampler = EpochSampler(size=size, batch_size=batch, seed=3, queue=True)
    buffer, read = list(range(size)), 0
    for epoch in range(12):
        drawn = []
        for place in sampler._places(epoch, CPU).tolist():
            drawn.append(buffer[place])
            buffer[place] = read % size
            read += 1
        assert sampler.indices(epoch).flatten().tolist() == drawn


def test_an_epoch_of_a_queue_misses_images_and_training_uses_all_equally():
    sampler = EpochSampler(size=1000, batch_size=50, queue=True)
    epochs = [sampler.indices(epoch).flatten() for epoch in range(30)]
    missed = [1 - len(epoch.unique()) / 1000 for epoch in epochs[5:]]
    assert 0.25 < sum(missed) / len(missed) < 0.31
    counts = torch.cat(epochs).bincount(minlength=1000)
    assert counts.sum() == 30_000
    assert counts.float().std() < 2.0  # independent draws have 5.5


def test_permutations_look_random():
    sampler = EpochSampler(size=1000, batch_size=10)
    permutation = sampler.permutation(0)
    ascents = (permutation[1:] > permutation[:-1]).sum()
    assert 440 < ascents < 560
    overlap = (permutation == sampler.permutation(1)).sum()
    assert overlap < 8


def test_processes_share_every_batch():
    whole = EpochSampler(size=50, batch_size=12)
    parts = [EpochSampler(size=50, batch_size=12, rank=rank, world_size=3) for rank in range(3)]
    assert torch.equal(torch.cat([part.indices(2) for part in parts], dim=1), whole.indices(2))
    assert torch.equal(torch.cat([part.draws(2) for part in parts], dim=1), whole.draws(2))


def test_every_draw_has_its_own_number():
    sampler = EpochSampler(size=10, batch_size=4)
    numbers = torch.cat([sampler.draws(epoch).flatten() for epoch in range(3)])
    assert torch.equal(numbers, torch.arange(36))


def test_a_batch_divides_evenly_among_the_processes():
    with pytest.raises(ConfigError, match="divide evenly"):
        EpochSampler(size=5, batch_size=4, world_size=3)


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


@pytest.mark.parametrize("crop", [{"pad": 2}, {"resize": 7}], ids=["padded", "resized"])
def test_half_a_batch_is_treated_as_in_the_whole(data, crop):
    indices, words = torch.arange(16), image_words(0, 16)
    augmentation = Augmentation(**crop, flip=True)
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
    pixels = erased_pixels(uniform_noise(_clock(), words)[3:8], 0.5, 6, 9)
    assert torch.equal(erased, torch.where(pixels[:, None], 0.0, whole))
    for image in pixels:
        rows, columns = image.any(1), image.any(0)
        assert torch.equal(image, rows[:, None] & columns)  # one rectangle, or nothing
        assert not image.any() or 0.01 * 54 <= image.sum() <= 0.45 * 54
    assert 150 <= pixels.flatten(1).any(1).sum() <= 250


@pytest.mark.parametrize("crop", [{"pad": 2}, {"resize": 7}], ids=["padded", "resized"])
def test_compiled(data, crop):
    words = image_words(0, 8)
    arguments = (data, torch.arange(8), Augmentation(**crop, flip=True, erasing=0.5), _clock(3), words)
    compiled = torch.compile(augmented_batch, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*arguments)[0], augmented_batch(*arguments)[0])
