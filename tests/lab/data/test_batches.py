"""The order of the images, their augmentation, and where batches come from."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from softprune.errors import ConfigError
from softprune.lab.data import ArrayDataset, Augmentation, DataBundle, EpochSampler
from softprune.lab.data.arrays import augmented_batch, erased_pixels, image_words, random_boxes, resized_crops
from softprune.rng import Clock, uniform_noise

CPU = torch.device("cpu")


def _arrays(augmentation=None):
    images = torch.arange(20 * 16, dtype=torch.float32).view(20, 1, 4, 4)
    data = ArrayDataset.from_arrays(images, torch.arange(20) % 3)
    return DataBundle(train=data, test=data, num_classes=3, augmentation=augmentation or Augmentation())


def test_batches_follow_the_sampler():
    bundle = _arrays()
    sampler = EpochSampler(size=20, batch_size=6)
    batches = bundle.batches(sampler, CPU)
    batches.begin(2, 0)
    for position in (0, 3):
        images, labels = batches.batch(torch.tensor([position]), Clock())
        expected = sampler.indices(2)[position]
        assert torch.equal(images, bundle.train.images[expected])
        assert torch.equal(labels, bundle.train.labels[expected])


def test_processes_see_the_same_augmented_images():
    bundle = _arrays(Augmentation(pad=1, flip=True))
    clock = Clock()
    clock.step.fill_(9)

    def epoch_batch(rank=0, world_size=1):
        sampler = EpochSampler(size=20, batch_size=8, rank=rank, world_size=world_size)
        batches = bundle.batches(sampler, CPU)
        batches.begin(0, 0)
        return batches.batch(torch.tensor([1]), clock)[0]

    whole = epoch_batch()
    assert torch.equal(torch.cat([epoch_batch(rank=rank, world_size=2) for rank in range(2)]), whole)


def test_the_authors_epoch_has_782_full_batches():
    sampler = EpochSampler(size=50_000, batch_size=64)
    assert sampler.steps == 782
    indices = sampler.indices(0)
    assert indices.shape == (782, 64)
    assert len(indices.flatten().unique()) == 50_000
    # The second epoch goes on where the first one stopped, 48 images into the second permutation.
    assert torch.equal(sampler.indices(1).flatten()[: 50_000 - 48], sampler.permutation(1)[48:])


@pytest.mark.parametrize(("size", "batch"), [(10, 4), (3, 8)])
def test_epochs_are_cut_from_an_endless_row_of_permutations(size, batch):
    sampler = EpochSampler(size=size, batch_size=batch, seed=3)
    row = torch.cat([sampler.indices(epoch).flatten() for epoch in range(12)])
    whole = len(row) // size
    for number, part in enumerate(row[: whole * size].view(whole, size)):
        assert torch.equal(part, sampler.permutation(number))
        assert torch.equal(part.sort().values, torch.arange(size))


def test_a_batch_divides_evenly_among_the_processes():
    with pytest.raises(ConfigError, match="must be divisible"):
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


@pytest.mark.parametrize("shape", [(37, 91), (9, 40)])
def test_crops_are_those_of_torchvision(shape):
    """Boxes have the distribution of RandomResizedCrop, and are resized as Pillow does it."""
    Image = pytest.importorskip("PIL.Image", reason='the "vision" extra is not installed')
    v2 = pytest.importorskip("torchvision.transforms.v2")
    u = torch.rand(22, 4000, generator=torch.Generator().manual_seed(0))
    boxes = random_boxes(torch.Size(shape), u[:2], u[2:])
    top, left, height, width = boxes
    assert bool(((top >= 0) & (left >= 0) & (top + height <= shape[0]) & (left + width <= shape[1])).all())
    assert torch.equal(boxes, boxes.round())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        draw = v2.RandomResizedCrop.make_params
        drawn = [draw(v2.RandomResizedCrop(8), [torch.zeros(1, *shape)]) for _ in range(4000)]
    single = torch.tensor([[each[key] for each in drawn] for key in ("top", "left", "height", "width")]).float()
    assert bool(((boxes.mean(1) - single.mean(1)).abs() <= 6 * single.std(1) / 4000**0.5 + 0.01).all())
    assert torch.allclose(boxes.std(1), single.std(1), rtol=0.07, atol=0.01)

    pixels = torch.randint(256, (3, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    flipped = torch.arange(20) % 2 == 1
    crops = resized_crops(pixels.expand(20, -1, -1, -1), boxes[:, :20], 24, flipped)
    for box, flip, crop in zip(boxes[:, :20].T.int().tolist(), flipped, crops, strict=True):
        expected = v2.functional.resized_crop(image, *box, [24, 24])
        expected = v2.functional.pil_to_tensor(expected.transpose(0) if flip else expected)
        assert (crop - expected).abs().max() <= 1.01  # Pillow rounds to bytes, after each of its two passes


def test_where_no_crop_fits_the_centre_is_taken():
    u = torch.zeros(22, 1)
    u[2:] = 1.0  # the whole area, and 4 to 3
    assert random_boxes(torch.Size((30, 30)), u[:2], u[2:]).flatten().tolist() == [0, 0, 30, 30]
    assert random_boxes(torch.Size((90, 30)), u[:2], u[2:]).flatten().tolist() == [25, 0, 40, 30]
