"""CIFAR from files like the official ones, small."""

import hashlib
import io
import pickle
import tarfile
from dataclasses import replace

import numpy as np
import pytest
import torch

from softprune.errors import DataError
from softprune.lab.data.cifar import CIFAR10, CIFAR100, load_cifar

SMALL10 = replace(CIFAR10, train_images=25, test_images=4)
SMALL100 = replace(CIFAR100, train_images=7, test_images=3)


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


@pytest.fixture(params=["python2", "bytes", "text"])
def cifar10(request, tmp_path):
    folder = tmp_path / CIFAR10.folder
    folder.mkdir()
    key = str.encode if request.param == "bytes" else str
    sizes = dict.fromkeys(CIFAR10.train_files, 5) | {"test_batch": 4}
    for seed, (name, size) in enumerate(sizes.items()):
        labels = [(seed + i) % 10 for i in range(size)]
        if request.param == "python2":
            (folder / name).write_bytes(_python2(_pixels(size, seed), labels))
        else:
            content = {key("data"): _pixels(size, seed), key("labels"): labels}
            (folder / name).write_bytes(pickle.dumps(content))
    names = [f"class {i}".encode() for i in range(10)]
    (folder / "batches.meta").write_bytes(pickle.dumps({key("label_names"): names}))
    return tmp_path


def _write100(root, **changes):
    folder = root / CIFAR100.folder
    folder.mkdir(exist_ok=True)
    for name, size in {"train": 7, "test": 3}.items():
        content = {"data": _pixels(size, size), "fine_labels": [99] * size, "coarse_labels": [1] * size} | changes
        (folder / name).write_bytes(pickle.dumps(content))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": [str(i) for i in range(100)]}))


def test_images_and_labels_in_the_official_order(cifar10):
    bundle = load_cifar(SMALL10, cifar10)
    assert bundle.train.images.shape == (25, 3, 32, 32)
    assert bundle.class_names[3] == "class 3"
    third = _pixels(5, 2).reshape(5, 3, 32, 32)
    assert torch.equal(bundle.train.images[10:15], torch.from_numpy(third))
    assert bundle.train.labels[10:15].tolist() == [2, 3, 4, 5, 6]
    normalised, _ = bundle.train.batch(torch.tensor([10]))
    blue = (third[0, 2, 31, 0] / 255 - 113.9 / 255) / (66.7 / 255)
    assert abs(float(normalised[0, 2, 31, 0]) - blue) < 1e-6


def test_root_may_be_the_folder_itself(cifar10):
    assert len(load_cifar(SMALL10, cifar10 / CIFAR10.folder).test) == 4


def test_cifar100_uses_fine_labels_and_its_own_constants(tmp_path):
    _write100(tmp_path)
    bundle = load_cifar(SMALL100, tmp_path)
    assert bundle.test.labels.tolist() == [99, 99, 99]
    assert bundle.train.mean.flatten().tolist() == pytest.approx([129.3, 124.1, 112.4])
    assert bundle.train.std.flatten().tolist() == pytest.approx([68.2, 65.4, 70.4])


def test_missing_files_say_where_they_belong_and_how_to_get_them(tmp_path):
    with pytest.raises(
        DataError, match=r"batches-py\. Got none of them.*kriz.*--data-dir.*--set data\.download=true.*`download=True`"
    ):
        load_cifar(CIFAR10, tmp_path)
    _write100(tmp_path)
    (tmp_path / CIFAR100.folder / "test").unlink()
    with pytest.raises(DataError, match="a folder without test"):
        load_cifar(SMALL100, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": np.zeros((7, 3072), np.float32)}, "of other elements than uint8"),
        ({"data": np.zeros((7, 100), np.uint8)}, "3072"),
        ({"data": [1, 2]}, "must be an array. Got list"),
        ({"fine_labels": [100] * 7}, "0 to 99"),
        ({"fine_labels": [0] * 6}, "one per image"),
        ({"fine_labels": ["cat"] * 7}, "whole numbers"),
        ({"fine_labels": None}, "one per image"),
        ({"data": np.zeros((6, 3072), np.uint8), "fine_labels": [0] * 6}, "must hold 7 images. Got 6"),
    ],
)
def test_wrong_content_is_refused(tmp_path, changes, message):
    _write100(tmp_path, **changes)
    with pytest.raises(DataError, match=message):
        load_cifar(SMALL100, tmp_path)


def _archive(source, path, extra=()):
    with tarfile.open(path, "w:gz") as tar:
        tar.add(source / CIFAR100.folder, CIFAR100.folder)
        for member, content in extra:
            tar.addfile(member, io.BytesIO(content))
    return replace(SMALL100, url=path.as_uri(), sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def test_download_unpacks_and_leaves_nothing_else(tmp_path):
    _write100(tmp_path)
    goal = tmp_path / "goal"
    bundle = load_cifar(_archive(tmp_path, tmp_path / "a.tar.gz"), goal, download=True)
    assert len(bundle.train) == 7
    assert [entry.name for entry in goal.iterdir()] == [CIFAR100.folder]


def test_download_replaces_an_incomplete_folder(tmp_path):
    _write100(tmp_path)
    cifar = _archive(tmp_path, tmp_path / "a.tar.gz")
    (tmp_path / CIFAR100.folder / "train").unlink()
    assert len(load_cifar(cifar, tmp_path, download=True).train) == 7


def test_download_with_another_checksum_unpacks_nothing(tmp_path):
    _write100(tmp_path)
    cifar = replace(_archive(tmp_path, tmp_path / "a.tar.gz"), sha256="0" * 64)
    goal = tmp_path / "goal"
    with pytest.raises(DataError, match="SHA-256"):
        load_cifar(cifar, goal, download=True)
    assert list(goal.iterdir()) == []


@pytest.mark.parametrize("has_filter", [True, False])
@pytest.mark.parametrize(("name", "kind"), [("../outside", tarfile.REGTYPE), ("outside", tarfile.SYMTYPE)])
def test_download_refuses_links_and_paths_that_lead_out(tmp_path, monkeypatch, has_filter, name, kind):
    if not has_filter:  # Python before 3.11.4
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    _write100(tmp_path)
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, "/etc/hostname"
    member.size = 1 if kind == tarfile.REGTYPE else 0
    cifar = _archive(tmp_path, tmp_path / "a.tar.gz", [(member, b"x")])
    goal = tmp_path / "deep" / "goal"
    with pytest.raises(DataError, match="plain files"):
        load_cifar(cifar, goal, download=True)
    assert not list(tmp_path.rglob("outside"))


def test_download_from_nowhere(tmp_path):
    cifar = replace(SMALL100, url=(tmp_path / "absent").as_uri())
    with pytest.raises(DataError, match="could not be downloaded"):
        load_cifar(cifar, tmp_path, download=True)


def test_a_dtype_that_claims_objects_reaches_no_pointer(tmp_path):
    """An object dtype made through BUILD once made NumPy treat the file's bytes as pointers, and crash."""
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
    folder = tmp_path / CIFAR100.folder
    _write100(tmp_path)
    good = replace(SMALL100, label_key="labels")
    (folder / "test").write_bytes(_python2(_pixels(3, 2), [1] * 3))
    for content in crafted:
        (folder / "train").write_bytes(content)
        try:
            images = load_cifar(good, tmp_path).train.images
        except DataError:
            continue
        # Flags are not read at all: the array is the plain one.
        assert torch.equal(images, torch.from_numpy(pixels).view(7, 3, 32, 32))


@pytest.mark.parametrize("labels", [[[1]] * 7, [10**400] * 7, [True] * 7, [1.0] * 7, {"a": 1}])
def test_labels_are_plain_numbers(tmp_path, labels):
    _write100(tmp_path, fine_labels=labels)
    with pytest.raises(DataError, match=r"whole numbers|0 to 99"):
        load_cifar(SMALL100, tmp_path)
