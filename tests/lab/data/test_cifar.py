"""CIFAR from files like the official ones, small, and pickles that are read as data."""

import os
import pickle

import numpy as np
import pytest
import torch

from softprune.errors import DataError
from softprune.lab.data.cifar import CIFAR10, CIFAR100, read_pickle
from softprune.lab.data.load import load_cifar


def _pixels(count, seed):
    return np.random.default_rng(seed).integers(0, 256, (count, 3072), dtype=np.uint8)


def _python2(pixels, labels):
    """The bytes that Python 2 and its NumPy wrote: 8-bit strings, protocol 2, the old module names."""

    def text(value):
        return b"U" + bytes([len(value)]) + value

    count = len(pixels).to_bytes(2, "little")
    raw = pixels.tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
        b"(K\x01M" + count + b"M\x00\x0c\x86"
        b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R(K\x03"
        + text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        b"T" + len(raw).to_bytes(4, "little") + raw + b"tb"
    )  # fmt: skip
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + numbers + b"u."


@pytest.fixture
def cifar10(tmp_path):
    folder = tmp_path / CIFAR10.folder
    folder.mkdir()
    sizes = dict.fromkeys(CIFAR10.train_files, 5) | {"test_batch": 4}
    for seed, (name, size) in enumerate(sizes.items()):
        labels = [(seed + i) % 10 for i in range(size)]
        (folder / name).write_bytes(_python2(_pixels(size, seed), labels))
    names = [f"class {i}".encode() for i in range(10)]
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": names}))
    return tmp_path


def _write100(root, **changes):
    folder = root / CIFAR100.folder
    folder.mkdir(exist_ok=True)
    for name, size in {"train": 7, "test": 3}.items():
        content = {"data": _pixels(size, size), "fine_labels": [99] * size, "coarse_labels": [1] * size}
        content |= changes if name == "train" else {}
        (folder / name).write_bytes(pickle.dumps(content, protocol=4))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": [str(i) for i in range(100)]}))


def test_images_and_labels_in_the_official_order(cifar10):
    bundle = load_cifar(CIFAR10, cifar10)
    assert bundle.train.images.shape == (25, 3, 32, 32)
    assert (bundle.augmentation.pad, bundle.augmentation.flip) == (4, True)
    assert bundle.class_names[3] == "class 3"
    third = _pixels(5, 2).reshape(5, 3, 32, 32)
    assert torch.equal(bundle.train.images[10:15], torch.from_numpy(third))
    assert bundle.train.labels[10:15].tolist() == [2, 3, 4, 5, 6]
    normalised, _ = bundle.train.batch(torch.tensor([10]))
    blue = (third[0, 2, 31, 0] / 255 - 113.9 / 255) / (66.7 / 255)
    assert abs(float(normalised[0, 2, 31, 0]) - blue) < 1e-6
    assert len(load_cifar(CIFAR10, cifar10 / CIFAR10.folder).test) == 4  # the folder itself


def test_cifar100_uses_fine_labels_and_its_own_constants(tmp_path):
    _write100(tmp_path)
    bundle = load_cifar(CIFAR100, tmp_path)
    assert bundle.test.labels.tolist() == [99, 99, 99]
    assert bundle.train.mean.flatten().tolist() == pytest.approx([129.3, 124.1, 112.4])
    assert bundle.train.std.flatten().tolist() == pytest.approx([68.2, 65.4, 70.4])
    (tmp_path / CIFAR100.folder / "test").unlink()
    with pytest.raises(DataError, match=r"a folder without test\. Unpack https.*--data-dir"):
        load_cifar(CIFAR100, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": np.zeros((7, 3072), np.float32)}, "uint8"),
        ({"data": np.zeros((7, 100), np.uint8)}, "reshape"),
        ({"fine_labels": [100] * 7}, "Labels must be from 0 to 99"),
        ({"fine_labels": [0] * 6}, "one int64 label each"),
        ({"fine_labels": None}, "NoneType"),
    ],
)
def test_wrong_content_is_refused(tmp_path, changes, message):
    _write100(tmp_path, **changes)
    with pytest.raises(DataError, match=message):
        load_cifar(CIFAR100, tmp_path)


def test_a_dtype_that_claims_objects_reaches_no_pointer(tmp_path):
    """An object dtype made through BUILD would make NumPy treat the file's bytes as pointers, and crash."""
    pixels = _pixels(7, 1)
    honest = _python2(pixels, [1] * 7)
    flags = b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
    assert flags in honest
    crafted = [
        honest.replace(flags, b"NNNK\x08K\x01K\x3ftb\x89"),  # size, alignment and flags of an object dtype
        honest.replace(b"U\x02u1", b"U\x02O8"),
        honest.replace(b"U\x02u1", b"U\x02V8"),
        honest.replace(b"K\x01M\x07\x00M\x00\x0c\x86", b"K\x01M\x07\x00J\xff\xff\xff\x7f\x86"),
    ]
    for content in crafted:
        (tmp_path / "train").write_bytes(content)
        try:
            images = read_pickle(tmp_path / "train")["data"]
        except DataError:
            continue
        assert np.array_equal(images, pixels)  # flags are not read at all: the array is the plain one


class _Runs:
    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    "call",
    [(os.mkdir, "proof"), (eval, "1"), (getattr, "x", "upper"), (bytes, 10**12), (np.load, "x")],
    ids=["mkdir", "eval", "getattr", "bytes", "np.load"],
)
def test_code_in_a_pickle_is_not_run(tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "file"
    path.write_bytes(pickle.dumps({"data": _Runs(*call)}))
    with pytest.raises(DataError, match=r"the name \w+\.\w+"):
        read_pickle(path)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("content", [b"cnumpy\ndtype\n}S'name'\nI1\nsb.", b"\x80\x04]\x94.", b"", b"\x80\x02}("])
def test_damage_is_an_error_that_names_the_file(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"{path} must be a pickle"):
        read_pickle(path)
