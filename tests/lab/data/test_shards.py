"""Tar shards in the WebDataset layout."""

import io
import tarfile

import fsspec
import pytest
import torch

from softprune.errors import ConfigError, DataError
from softprune.lab.data import BatchLoader, load_data
from softprune.lab.data.batches import EpochSampler
from softprune.lab.data.images import BrokenImage
from softprune.lab.data.shards import expand_braces, write_shards

Image = pytest.importorskip("PIL.Image", reason='the "vision" extra is not installed')


@pytest.fixture
def folder(tmp_path):
    for split, count in {"train": 5, "val": 2}.items():
        for label, name in enumerate(("bee", "ant")):
            place = tmp_path / "images" / split / name
            place.mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (20 + i, 30), (40 * i, 100 * label, 200)).save(place / f"{i}.png")
    return tmp_path / "images"


@pytest.fixture
def root(folder, tmp_path):
    write_shards(folder, tmp_path / "shards", per_shard=4)
    return tmp_path / "shards"


def _load(root, **options):
    return load_data("webdataset", root, image_size=16, **options)


def _tar(path, **members):
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name.replace("__", "."))
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def test_shards_hold_the_images_of_the_folder(root, folder):
    assert [path.name for path in sorted(root.iterdir())] == [
        "classes.txt",
        *(f"train-{n:06d}.tar" for n in range(3)),
        "val-000000.tar",
    ]
    bundle, images = _load(root, augment=False), load_data("folder", folder, image_size=16, augment=False)
    assert (bundle.class_names, bundle.num_classes) == (("ant", "bee"), 2)
    assert (len(bundle.train), len(bundle.test)) == (10, 4)

    def content(data):
        return sorted((label, image.flatten().tolist()) for image, label in (data[i, 0] for i in range(10)))

    assert content(bundle.train) == content(images.train)
    assert bundle.train.labels.tolist() != sorted(bundle.train.labels.tolist()), "shards are shuffled"
    with tarfile.open(root / "train-000000.tar") as tar:
        assert [m.name for m in tar][:3] == ["00000000.png", "00000000.cls", "00000001.png"]


def test_writing_again_gives_the_same_bytes_and_resumes(root, folder, tmp_path):
    before = {path.name: path.read_bytes() for path in root.iterdir()}
    (root / "train-000001.tar").unlink()
    write_shards(folder, root, per_shard=4)
    assert {path.name: path.read_bytes() for path in root.iterdir()} == before


def test_shards_of_other_images_are_not_taken_for_written(root, folder):
    with pytest.raises(DataError, match=r"Got .*train-000000\.tar, written from other images or with another number"):
        write_shards(folder, root, per_shard=3)


def test_a_pass_resumes_in_mid_epoch_and_on_two_processes(root):
    """Order and crops are those of the whole epoch, wherever and by however many processes it is read."""
    train = _load(root, holdout=2).train

    def epoch(start=0, rank=0, world=1):
        sampler = EpochSampler(size=len(train), batch_size=4, seed=3, rank=rank, world_size=world)
        order, draws = sampler.indices(1)[start:], sampler.draws(1)[start:]
        return list(BatchLoader(train, workers=0).batches(order, draws))

    whole = epoch()
    assert len(whole) == 2
    for (images, labels), (rest, rest_labels) in zip(whole[1:], epoch(start=1), strict=True):
        assert torch.equal(images, rest)
        assert torch.equal(labels, rest_labels)
    halves = [epoch(rank=rank, world=2) for rank in range(2)]
    for batch, first, second in zip(whole, *halves, strict=True):
        assert torch.equal(batch[0], torch.cat([first[0], second[0]]))


def test_shards_of_an_object_store_are_fetched_through_fsspec(root, tmp_path):
    store = fsspec.filesystem("memory")
    for path in root.glob("*.tar"):
        store.pipe_file(f"/bucket/{path.name}", path.read_bytes())
    urls = {
        "train_shards": "memory://bucket/train-{000000..000002}.tar",
        "val_shards": "memory://bucket/val-000000.tar",
    }
    bundle = _load(tmp_path / "cache", download=True, **urls)
    assert len(bundle.train) == len(_load(root).train)
    for url, message in {
        "memory://bucket/gone.tar": "gone.tar could not be downloaded: there is no such file. .*credentials",
        "nowhere://bucket/a.tar": "nowhere://bucket/a.tar could not be downloaded: Protocol not known",
        "oci://bucket/a.tar": r"`pip install 'fsspec\[oci\]'`",
    }.items():
        with pytest.raises(DataError, match=message):
            _load(tmp_path / "cache", download=True, train_shards=url)
        assert not (tmp_path / "cache" / url.partition("://")[2]).exists()


def test_a_url_is_fetched_once(root, tmp_path):
    urls = {
        "train_shards": f"file://{root}/train-{{000000..000002}}.tar",
        "val_shards": f"file://{root}/val-000000.tar",
    }
    with pytest.raises(DataError, match=rf"Got no {str(root)[1:]}/train-000000\.tar there; set data\.download = true"):
        _load(tmp_path / "cache", **urls)
    bundle = _load(tmp_path / "cache", download=True, **urls)
    assert len(bundle.train) == 10
    for path in root.glob("*.tar"):
        path.unlink()
    assert len(_load(tmp_path / "cache", **urls).train) == 10
    with pytest.raises(DataError, match=r"file:///gone/train-000003.tar could not be downloaded"):
        _load(tmp_path / "cache", download=True, train_shards="file:///gone/train-000003.tar")
    with pytest.raises(DataError, match=r"must list the shards of a URL with braces.*Got 'file:///x-\*"):
        _load(tmp_path / "cache", train_shards="file:///x-*.tar")


def test_urls_that_end_alike_are_shards_of_their_own(root, tmp_path):
    for number, name in enumerate(("train-000000", "train-000001", "val-000000")):
        (tmp_path / str(number)).mkdir()
        (root / f"{name}.tar").rename(tmp_path / str(number) / "a.tar")
    url = f"file://{tmp_path}/{{}}/a.tar".format
    both = [_load(root, download=True, train_shards=url(number), val_shards=url(2)).train for number in (0, 1)]
    assert both[0].read(0) != both[1].read(0)
    assert both[0].read(0) in (tmp_path / "0" / "a.tar").read_bytes()
    with pytest.raises(DataError, match=r"Got no x/a\.tar there"):
        _load(root, train_shards="https://y/../../x/a.tar")


@pytest.mark.parametrize("cut", [300, 512 * 3, "class", "member", "half"])
def test_a_truncated_shard_is_named(root, cut):
    path = root / "train-000001.tar"
    content = path.read_bytes()
    with tarfile.open(path) as tar:
        members = tar.getmembers()
    # Between two samples, nothing but the end of the archive is missing; before a class, a sample looks incomplete.
    size = {"class": members[1].offset, "member": members[2].offset, "half": len(content) // 4}.get(cut, cut)
    path.write_bytes(content[:size])
    with pytest.raises(DataError, match=r"must be a complete.*train-000001\.tar: .*again"):
        _load(root)


def test_a_shard_truncated_after_the_start(root):
    train = _load(root).train
    for path in root.glob("train-*.tar"):
        path.write_bytes(path.read_bytes()[:600])
    item = train[3, 0]
    assert isinstance(item, BrokenImage)
    assert "train-000000.tar (the image at byte " in item.path
    assert item.reason == "the shard is truncated"


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"a__png": b"x"}, "must have one image and its class number.*a with png"),
        ({"a__png": b"x", "b__cls": b"1"}, "a with png"),
        ({"a__png": b"x", "a__jpg": b"x", "a__cls": b"1"}, "a with cls, jpg, png"),
        ({"a__png": b"x", "a__cls": b"-1"}, "a.cls with '-1'"),
        ({"a__png": b"x", "a__cls": b"ant"}, "a.cls with 'ant'"),
        ({"a__png": b"x", "a__cls": b"99999999999"}, "A class must be a number from 0"),
        ({}, "at least one image"),
    ],
)
def test_samples_that_are_incomplete(root, members, message):
    _tar(root / "train-000001.tar", **members)
    with pytest.raises(DataError, match=message):
        _load(root)


def test_other_mistakes(root, tmp_path):
    with pytest.raises(DataError, match=r"data\.train_shards must be .*'x-\*\.tar': there is no .*x-\*\.tar"):
        _load(root, train_shards="x-*.tar")
    with pytest.raises(DataError, match=r"there is no .*train-000003\.tar"):
        _load(root, train_shards="train-{000000..000009}.tar")
    with pytest.raises(DataError, match="--data-dir"):
        load_data("webdataset")
    (root / "classes.txt").write_bytes(b"ant\n\xff\n")
    with pytest.raises(DataError, match=r"classes\.txt must name the classes in UTF-8"):
        _load(root)
    (root / "classes.txt").write_text("ant\n")
    with pytest.raises(DataError, match=r"classes\.txt must name every class.*Got 1 names and labels up to 1"):
        _load(root)
    (root / "val-000000.tar").write_bytes(b"\x1f\x8b" + bytes(600))
    with pytest.raises(DataError, match="uncompressed tar file"):
        _load(root)


def test_braces():
    assert expand_braces("a-{08..11}.tar") == ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]
    assert expand_braces("{x,y}/{0..1}") == ["x/0", "x/1", "y/0", "y/1"]
    for pattern in ("{3..1}", "{0..9999999}", "{0..9999}{0..9999}"):
        with pytest.raises(ConfigError, match="must be increasing"):
            expand_braces(pattern)
