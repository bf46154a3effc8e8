"""Images that are loaded when their batch is due: folders, and data sets of torch."""

import os
import random
import signal

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, default_collate

from softprune.errors import DataError
from softprune.lab.data import BatchLoader, EpochSampler, LoadedDataset, load_data
from softprune.rng import Clock

Image = pytest.importorskip("PIL.Image", reason='the "vision" extra is not installed')


@pytest.fixture
def root(tmp_path):
    chance = torch.Generator().manual_seed(0)
    for split, count in {"train": 5, "val": 2}.items():
        for name in ("bee", "ant"):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = torch.randint(256, (24, 32, 3), dtype=torch.uint8, generator=chance)
                Image.fromarray(pixels.numpy()).save(folder / f"{i}.png")
    return tmp_path


def _load(root, **options):
    return load_data("folder", root, image_size=16, **options)


def test_classes_are_sorted_and_files_found(root):
    (root / "train" / "ant" / "deeper").mkdir()
    Image.new("L", (20, 20), 7).save(root / "train" / "ant" / "deeper" / "grey.JPEG")
    for name in ("notes.txt", "._0.png"):
        (root / "train" / "ant" / name).write_text("x")
    bundle = _load(root)
    assert bundle.class_names == ("ant", "bee")
    assert (bundle.num_classes, bundle.input_shape) == (2, (3, 16, 16))
    assert [bundle.train[index, 0][1] for index in range(len(bundle.train))] == [0] * 6 + [1] * 5
    image, _ = bundle.train[5, 0]
    assert (image.shape, image.dtype) == ((3, 16, 16), torch.uint8)
    assert bool((image == 7).all())


@pytest.mark.parametrize("options", [{}, {"erasing": 1.0}], ids=str)
def test_training_images_depend_on_seed_and_draw_alone(root, options):
    before = torch.get_rng_state()
    train = _load(root, **options).train
    first, second = train[0, 5][0], train[0, 6][0]
    assert torch.equal(first, _load(root, **options).train[0, 5][0])
    assert not torch.equal(first, second)
    assert not torch.equal(first, _load(root, seed=1, **options).train[0, 5][0])
    assert torch.equal(before, torch.get_rng_state())
    plain = _load(root, augment=False, **options)
    assert torch.equal(plain.train[0, 5][0], plain.train[0, 6][0])
    assert torch.equal(plain.test[0, 0][0], _load(root, **options).test[0, 0][0])


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_come_in_the_given_order_and_again(root, workers):
    train = _load(root).train
    loader = BatchLoader(train, workers=workers)
    before = torch.get_rng_state()
    order = torch.tensor([[0, 9], [5, 3], [8, 8]])
    draws = torch.arange(6).view(3, 2)
    for start in (0, 1):
        got = list(loader.batches(order[start:], draws[start:]))
        assert len(got) == 3 - start
        for (images, labels), indices, numbers in zip(got, order[start:], draws[start:], strict=True):
            assert labels.tolist() == [int(index >= 5) for index in indices]
            for image, index, draw in zip(images, indices.tolist(), numbers.tolist(), strict=True):
                assert torch.equal(image, train[index, draw][0])
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(("workers", "content"), [(1, "half"), (0, "EPS")])
def test_a_broken_image_is_named_when_its_batch_comes(root, workers, content):
    """Pillow's EPS decoder starts Ghostscript, whatever the file is called."""
    train = _load(root).train
    path = root / "train" / "bee" / "2.png"
    half = path.read_bytes()[:60]
    if content == "EPS":
        Image.new("RGB", (20, 20)).save(path, format="EPS")
    else:
        path.write_bytes(half)
    batches = BatchLoader(train, workers=workers).batches(
        torch.tensor([[0], [7]]), torch.zeros(2, 1, dtype=torch.int64)
    )
    with pytest.raises(DataError, match=r"^Every image and label must .* Got an error in .*bee/2\.png: .*a new run\.$"):
        list(batches)


def _closed_terminal(items):
    for number in (signal.SIGINT, signal.SIGHUP):
        os.kill(os.getpid(), number)
    return default_collate(items)


def test_a_closed_terminal_leaves_the_workers_alone(root):
    loader = BatchLoader(_load(root).train, workers=1)
    loader._loader.collate_fn = _closed_terminal
    assert len(list(loader.batches(torch.tensor([[0], [1]]), torch.zeros(2, 1, dtype=torch.int64)))) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda root: (root / "val").rename(root / "validation"),
            r"train and .*/val, each with a folder.*No such file",
        ),
        (lambda root: [path.unlink() for path in (root / "val" / "bee").iterdir()], r"Got .*no valid file.* bee"),
        (lambda root: (root / "val" / "bee").rename(root / "val" / "cat"), r"Got bee, cat in only one of them"),
    ],
)
def test_an_incomplete_folder(root, change, message):
    change(root)
    with pytest.raises(DataError, match=message):
        _load(root)


def test_a_path_with_a_nul_byte_is_refused(root):
    with pytest.raises(DataError, match=r"Got .*embedded null"):
        _load(root / "a\0b")


def test_held_out_images_are_not_augmented(root):
    bundle, plain = _load(root, holdout=3), _load(root, augment=False)
    assert (len(bundle.train), len(bundle.holdout)) == (7, 3)
    assert torch.equal(bundle.holdout[0, 1][0], bundle.holdout[0, 2][0])
    assert not torch.equal(bundle.train[0, 1][0], bundle.train[0, 2][0])
    every = [plain.train[index, 0][0] for index in range(10)]
    assert all(any(torch.equal(bundle.holdout[index, 0][0], image) for image in every) for index in range(3))
    files = [part._source(index) for part in (bundle.train, bundle.holdout) for index in range(len(part))]
    assert len(set(files)) == 10


def test_images_in_memory_are_those_from_files(root):
    files, kept = _load(root, holdout=3), _load(root, holdout=3, in_memory=True, workers=1)
    for name in ("test", "holdout"):
        part = getattr(kept, name)
        for index in range(len(part)):
            image, label = getattr(files, name)[index, 0]
            assert torch.equal(part.images[index], image)
            assert int(part.labels[index]) == label
    assert (kept.input_shape, kept.num_classes, kept.class_names) == ((3, 16, 16), 2, ("ant", "bee"))
    assert kept.train.images.shape == (7, 3, 24, 32)
    assert kept.train.labels.tolist() == [files.train[index, 0][1] for index in range(7)]
    kept = _load(root, augment=False, in_memory=True, workers=0)
    plain = _load(root, augment=False).train
    assert torch.equal(kept.train.images, torch.stack([plain[index, 0][0] for index in range(10)]))


def test_training_batches_from_memory_are_random_crops(root):
    bundle = _load(root, in_memory=True, erasing=0.5, workers=0)
    augmentation = bundle.augmentation
    assert (augmentation.resize, augmentation.flip, augmentation.erasing) == (16, True, 0.5)
    batches = bundle.batches(EpochSampler(size=10, batch_size=8), torch.device("cpu"))
    batches.begin(0, 0)
    images, labels = batches.batch(torch.tensor([0]), Clock(0))
    assert (images.shape, images.dtype) == ((8, 3, 16, 16), torch.float32)
    assert torch.equal(labels, bundle.train.labels[batches.sampler.indices(0)[0]])
    assert (images == 0).all(1).any()  # erased


class _Random(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 3:
            raise OSError("no such image")
        values = [torch.rand(()), random.random(), np.random.rand()]  # noqa: NPY002
        return torch.tensor(values).view(3, 1, 1).expand(3, 2, 2), 1


def test_random_transforms_of_ones_own_depend_on_seed_and_draw_alone():
    before = torch.get_rng_state(), random.getstate()
    data = LoadedDataset(_Random(), num_classes=2, seed=1)
    assert torch.equal(data[0, 5][0], data[1, 5][0])
    assert len(set((data[0, 5][0] - data[0, 6][0]).flatten().tolist()) - {0.0}) == 3
    for seed in (2, 2**31 - 1):  # the largest of a recipe
        assert not (data[0, 5][0] == LoadedDataset(_Random(), num_classes=2, seed=seed)[0, 5][0]).any()
    assert (data.dtype, data.std.flatten().tolist()) == (torch.float32, [1.0, 1.0, 1.0])
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    with pytest.raises(DataError, match=r"Got an error in item 3 of _Random: no such image\."):
        data[3, 0]


IMAGE = torch.zeros(3, 8, 8)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        *[((IMAGE, label), "label|int|NaN") for label in (None, -1, 3, 1.7, float("nan"))],
        ((IMAGE, torch.zeros(8, 8)), "scalar"),
        (7, "unpack"),
    ],
)
def test_an_item_that_cannot_be_used_is_named(item, message):
    data = LoadedDataset([(IMAGE, 0), item], num_classes=3)
    with pytest.raises(DataError, match=rf"Got an error in item 1 of list: .*({message})"):
        data[1, 0]


def test_arrays_and_pictures_have_their_channels_last():
    values = torch.rand(3, 8, 9)
    assert torch.equal(LoadedDataset([(values.permute(1, 2, 0).numpy(), 0)], num_classes=1)[0, 0][0], values)
    assert LoadedDataset([(Image.new("L", (9, 8), 5), 0)], num_classes=1).shape == (1, 8, 9)
