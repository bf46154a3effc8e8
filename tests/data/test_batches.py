"""Where batches come from."""

import pytest
import torch

from softprune.data import ArrayDataset, Augmentation, DataBundle, load_data
from softprune.data.batches import ArrayBatches, EpochSampler, LoaderBatches, make_batches
from softprune.errors import ConfigError
from softprune.rng import Clock

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
    Image = pytest.importorskip("PIL.Image")
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
