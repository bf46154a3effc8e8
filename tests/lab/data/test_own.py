"""Data sets of the user's own."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from softprune.errors import ConfigError, DataError
from softprune.lab.data import ArrayDataset, BatchLoader, load_data
from softprune.lab.data.images import BrokenImage
from softprune.lab.data.loader import broken_images
from softprune.lab.data.own import TorchDataset
from softprune.lab.data.own import _bundle as own_bundle

_MODULE = """
import torch
from torch.utils.data import TensorDataset
from softprune.lab.data import ArrayDataset, Augmentation, DataBundle, LoadedDataset, load_data

class Images(TensorDataset):
    classes = ["cat", "dog", "cow"]

def made(count, channels=3, dtype=torch.uint8):
    images = torch.arange(count * channels * 64).view(count, channels, 8, 8) % 251
    return Images(images.to(dtype), torch.arange(count) % 3)

def pair(root, image_size):
    assert image_size == 32 and root.name == "files"
    return made(20), made(6)

def bundle():
    part = ArrayDataset.from_arrays(torch.zeros(4, 1, 5, 5), torch.arange(4))
    return DataBundle(
        name="mine", num_classes=4, input_shape=(1, 5, 5), train=part, test=part, augmentation=Augmentation(flip=True)
    )

def bare():
    return DataBundle(name="mine", num_classes=3, input_shape=(3, 8, 8), train=made(4), test=made(4))

def vast():
    part = ArrayDataset.from_arrays(torch.zeros(4, 1, 5, 5), torch.arange(4) + 3)
    return DataBundle(name="mine", num_classes=4, input_shape=(1, 5, 5), train=part, test=part)

def misshapen():
    part = ArrayDataset.from_arrays(torch.zeros(4, 1, 5, 5), torch.arange(4))
    return DataBundle(name="mine", num_classes=4, input_shape=(1, 6, 5), train=part, test=part)

def untested():
    part = ArrayDataset.from_arrays(torch.zeros(4, 1, 5, 5), torch.arange(4))
    return part, part.subset(torch.arange(0))

class Loaded(LoadedDataset):
    num_classes = 2
    def __len__(self):
        return 4
    def load(self, index, draw):
        return torch.zeros(3, 6, 6, dtype=torch.uint8), index % 2

def loaded():
    return Loaded(), Loaded()

def arrays():
    part = ArrayDataset.from_arrays(torch.zeros(4, 1, 5, 5), torch.arange(4))
    return part, part

def unequal():
    return made(4), made(4, 1)

def unnamed():
    return ([(torch.zeros(1, 5, 5), 1)] * 4,) * 2

def worded():
    pair = (TensorDataset(torch.zeros(4, 1, 5, 5), torch.arange(4)),) * 2
    pair[0].num_classes = "4"
    return pair

def one():
    return made(4)

def needs(something):
    return made(4), made(4)

class Items(torch.utils.data.Dataset):
    classes = ["cat", "dog", "cow"]
    def __init__(self, *items):
        self.items = items
    def __len__(self):
        return len(self.items)
    def __getitem__(self, index):
        return self.items[index]

IMAGE = torch.zeros(3, 8, 8)

def dicts():
    return (Items({"image": IMAGE, "label": 1}),) * 2

def triples():
    return (Items((IMAGE, 1, "path")),) * 2

def maps():
    return (Items((IMAGE, torch.zeros(8, 8))),) * 2

def palettes():
    from PIL import Image
    return (Items((Image.new("RGB", (8, 8)).quantize(4), 1)),) * 2

def loaders():
    return (torch.utils.data.DataLoader(made(4)),) * 2

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield IMAGE, 1

def streams():
    return Stream(), Stream()

def three():
    return (made(4),) * 3

def split():
    return torch.utils.data.random_split(made(8), [6, 2])

def labels():
    return (Items((IMAGE, 0), (IMAGE, 3)),) * 2

class Classed(ArrayDataset):
    classes = ["cat", "dog"]

def far():
    part = Classed.from_arrays(torch.zeros(4, 1, 5, 5), torch.arange(4))
    return part, part

def targets():
    part = made(4)
    part.targets = [0, 1, 2, 7]
    return made(4), part

def rooted(root):
    return root / "train", root / "test"

def sized(seed, *, count, **more):
    assert more == {"root": None, "image_size": 224, "augment": True, "fold": 2}
    return made(count), made(6)

def nested():
    return load_data("folder")

def numbers():
    return [1, 2], [3]
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_own_data.py").write_text(_MODULE)


def test_a_pair_of_torch_data_sets(own):
    data = load_data("my_own_data:pair", Path("files"), image_size=32)
    assert (data.num_classes, data.class_names, data.input_shape) == (3, ("cat", "dog", "cow"), (3, 8, 8))
    assert (len(data.train), len(data.test)) == (20, 6)
    rows = torch.tensor([[3, 1], [0, 2]])
    images, labels = next(BatchLoader(data.train, workers=0).batches(rows, rows))
    assert images.dtype == torch.uint8
    assert torch.equal(images[0], data.train.dataset[3][0])
    assert labels.tolist() == [0, 1]
    held = load_data("my_own_data:pair", Path("files"), image_size=32, holdout=5)
    assert (len(held.train), len(held.holdout)) == (15, 5)
    assert len(load_data("my_own_data:split").test) == 2


def test_options_are_arguments_of_the_factory(own):
    assert len(load_data("my_own_data:sized", options={"count": 9, "fold": 2}).train) == 9
    with pytest.raises(DataError, match=r"that it takes, fold\. Got 'my_own_data:pair': .* 'fold'.*or data\.options\."):
        load_data("my_own_data:pair", options={"fold": 2})
    with pytest.raises(DataError, match=r"data\.options are arguments of a factory .* Got {'fold': 2} for 'digits'"):
        load_data("digits", options={"fold": 2})


def test_bundles_and_arrays_are_taken_as_they_are(own):
    assert load_data("my_own_data:bundle").augmentation.flip
    assert not load_data("my_own_data:bundle", augment=False).augmentation.flip
    assert load_data("my_own_data:arrays").num_classes == 4
    assert load_data("my_own_data:loaded").input_shape == (3, 6, 6)


def test_arrays_are_moved_to_the_device(own, monkeypatch):
    moved = []
    monkeypatch.setattr(ArrayDataset, "to", lambda part, device: moved.append((len(part), device)) or part)
    load_data("my_own_data:arrays", device="cuda")
    load_data("my_own_data:bundle", device="cuda", holdout=1)
    assert moved == [(4, "cuda"), (4, "cuda"), (3, "cuda"), (4, "cuda"), (1, "cuda")]


@pytest.mark.parametrize(
    ("factory", "error", "message"),
    [
        ("unequal", DataError, r"must have one shape. Got \(3, 8, 8\) and \(1, 8, 8\)"),
        ("unnamed", DataError, "must say how many classes"),
        ("worded", DataError, "how many classes it has, at least 2. Got '4' from"),
        ("one", DataError, r"must return \(train, test\)"),
        ("needs", DataError, "called with those of root, image_size, seed, augment"),
        ("rooted", DataError, r"TypeError: unsupported .* raised in line \d+ of .*my_own_data.py by .*\(root=None\)"),
        ("nested", DataError, "^Images in files need their folder's path"),
        ("numbers", DataError, r"items \(image, label\)"),
        ("dicts", DataError, r"must be \(image, label\). Got a dict with the keys image, label\.$"),
        ("triples", DataError, r"must be \(image, label\). Got a tuple of 3\.$"),
        ("maps", DataError, r"number of a class. Got a tensor of shape \(8, 8\); for other tasks"),
        ("palettes", DataError, r'Got mode P, numbers of colours; return image.convert\("RGB"\)'),
        ("loaders", DataError, r"it is no DataLoader and no IterableDataset. Got DataLoader"),
        ("streams", DataError, r"it is no DataLoader and no IterableDataset. Got Stream"),
        ("three", DataError, r"must return \(train, test\).*Got a tuple of 3 from"),
        ("targets", DataError, r"Labels must be from 0 to 2, since there are 3 classes. Got 0 to 7"),
        ("far", DataError, r"Labels must be from 0 to 1, since there are 2 classes. Got 0 to 3"),
        ("bare", DataError, r"`train` of a DataBundle must be .* Got a Images; return the pair \(train, test\)"),
        ("vast", DataError, r"Labels must be from 0 to 3, since there are 4 classes. Got 3 to 6 from 'mine'"),
        ("misshapen", DataError, r"shape `input_shape`, \(1, 6, 5\). Got \(1, 5, 5\) for `train` of 'mine'"),
        ("untested", DataError, "must have training and test images. Got no `test` in 'my_own_data:untested'"),
        ("missing", ConfigError, "must name something in the module"),
    ],
)
def test_what_a_factory_must_return(own, factory, error, message):
    with pytest.raises(error, match=message):
        load_data(f"my_own_data:{factory}")


def test_a_label_beyond_the_classes_is_named_with_its_item(own):
    data = load_data("my_own_data:labels")
    assert data.train[0, 0][1] == 0
    broken = data.train[1, 0]
    assert isinstance(broken, BrokenImage)
    assert (broken.path, broken.reason) == (
        "item 1 of Items",
        "A label must be from 0 to 2, since there are 3 classes. Got 3; "
        "number the classes from 0, or correct `classes` or "
        "`num_classes` of the training set.",
    )


@pytest.mark.parametrize(
    ("other", "shown"), [(torch.zeros(3, 9, 8), "3x9x8 of float32"), (torch.zeros(3, 8, 8).byte(), "3x8x8 of uint8")]
)
def test_an_image_of_another_shape_or_type_is_named(other, shown):
    data = [(torch.zeros(3, 8, 8), 0), (other, 1)]
    broken = TorchDataset(data)[1, 0]
    assert isinstance(broken, BrokenImage)
    assert broken.path == "item 1 of list"
    assert f"one shape and type. Got {shown}, and 3x8x8 of float32 of the first one; resize" in broken.reason


def test_an_array_has_its_channels_last():
    values = torch.rand(3, 8, 9)
    image, _ = TorchDataset([(values.permute(1, 2, 0).numpy(), 0)]).load(0, 0)
    assert torch.equal(image, values)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_images_that_are_not_finite_are_found(bad):
    images = torch.zeros(3, 3, 8, 8)
    images[1, 2, 3, 4] = bad
    found = list(broken_images(TorchDataset([(image, 0) for image in images]), workers=0))
    assert [(each.path, each.reason) for each in found] == [("item 1 of list", "It holds infinity or NaN.")]


def test_the_first_image_is_loaded_once():
    loaded = []

    class Items(torch.utils.data.Dataset):
        num_classes = 2

        def __len__(self):
            return 4

        def __getitem__(self, index):
            loaded.append(index)
            return torch.zeros(3, 8, 8), 0

    assert own_bundle("mine", (Items(), Items()), 0).input_shape == (3, 8, 8)
    assert loaded == [0, 0], "one of each data set"


def test_parts_of_a_data_set_have_its_classes():
    data = torch.utils.data.TensorDataset(torch.zeros(9, 3, 8, 8), torch.arange(9) % 3)
    parts = torch.utils.data.random_split(data, [6, 3])
    whole = torch.utils.data.ConcatDataset(parts)
    assert own_bundle("mine", parts, 0).num_classes == 3
    data.classes = ["cat", "dog", "cow", "hen"]
    assert own_bundle("mine", (whole, parts[1]), 0).class_names == ("cat", "dog", "cow", "hen")
    whole.num_classes = 5
    assert own_bundle("mine", (whole, parts[1]), 0).num_classes == 5


def test_the_number_of_classes_may_be_of_numpy():
    data = torch.utils.data.TensorDataset(torch.zeros(3, 3, 8, 8), torch.arange(3))
    data.num_classes = np.int64(3)
    assert type(own_bundle("mine", (data, data), 0).num_classes) is int


def test_labels_before_a_target_transform_may_be_any():
    data = torch.utils.data.TensorDataset(torch.zeros(3, 3, 8, 8), torch.arange(3))
    data.num_classes, data.targets, data.target_transform = 3, [1, 2, 3], lambda label: label - 1
    assert own_bundle("mine", (data, data), 0).num_classes == 3
    data.target_transform = None
    with pytest.raises(
        DataError, match=r"Labels must be from 0 to 2, since there are 3 classes\. Got 1 to 3 from 'mine'"
    ):
        own_bundle("mine", (data, data), 0)


@pytest.mark.parametrize(("label", "shown"), [(None, "a NoneType"), ({"boxes": 1}, "a dict with the keys boxes")])
def test_a_label_that_is_no_number(label, shown):
    items = [(torch.zeros(3, 8, 8), label)] * 2
    with pytest.raises(DataError, match=f"A label must be the number of a class. Got {shown}; for other tasks"):
        own_bundle("mine", (items, items), 0)


@pytest.mark.parametrize("label", [1.7, np.float32(1.7), torch.tensor(1.7), float("nan"), float("inf")])
def test_a_label_between_two_classes(label):
    items = [(torch.zeros(3, 8, 8), label)] * 2
    with pytest.raises(
        DataError, match=r"A label must be the number of a class. Got (1.7|nan|inf); number the classes"
    ):
        own_bundle("mine", (items, items), 0)
    with pytest.raises(DataError, match="A label must be the number of a class"):
        ArrayDataset.from_arrays(torch.zeros(2, 3, 8, 8), [0, label])


@pytest.mark.parametrize("label", [1, "1", 1.0, np.float64(1), torch.tensor([1.0]), True])
def test_a_label_that_is_whole(label):
    assert TorchDataset([(torch.zeros(3, 8, 8), label)]).load(0, 0)[1] == 1


@pytest.mark.parametrize("name", ["./my_own_data.py:pair", "my_own_data.py:pair", "my_own_data.pair"])
def test_a_path_or_a_dotted_name_in_place_of_a_factory(own, name):
    with pytest.raises((ConfigError, DataError), match=r"Did you mean 'my_own_data:pair'"):
        load_data(name)
    with pytest.raises((ConfigError, DataError), match=r"Did you mean 'my_own_data:factory'"):
        load_data("./my_own_data.py")


class _Random(torch.utils.data.Dataset):
    num_classes = 2

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 3:
            raise OSError("no such image")
        values = [torch.rand(()), random.random(), np.random.rand()]  # noqa: NPY002
        return torch.tensor(values).view(3, 1, 1).expand(3, 2, 2), 1


def test_random_transforms_depend_on_seed_and_draw_alone():
    before = torch.get_rng_state(), random.getstate()
    data = TorchDataset(_Random(), seed=1)
    assert torch.equal(data[0, 5][0], data[1, 5][0])
    assert len(set((data[0, 5][0] - data[0, 6][0]).flatten().tolist()) - {0.0}) == 3
    for seed in (2, 2**31 - 1):  # the largest of a recipe
        assert not (data[0, 5][0] == TorchDataset(_Random(), seed=seed)[0, 5][0]).any()
    assert data.dtype == torch.float32
    assert data.std == (1.0, 1.0, 1.0)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert data[3, 0] == BrokenImage("item 3 of _Random", "no such image")
