"""Images in folders."""

import importlib
import io
import logging
import os
import random
import re
import signal

import numpy as np
import pytest
import torch

from softprune.errors import DataError
from softprune.lab.data import BatchLoader, load_data, loader
from softprune.lab.data.augment import random_box
from softprune.lab.data.images import BrokenImage, decode_image, normalised

Image = pytest.importorskip("PIL.Image", reason='the "vision" extra is not installed')


@pytest.fixture
def root(tmp_path):
    for split, count in {"train": 4, "val": 2}.items():
        for label, name in enumerate(("bee", "ant", "cat")):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                colour = (40 * i, 100 * label, 200)
                Image.new("RGB", (40 + i, 30), colour).save(folder / f"{i}.png")
    return tmp_path


def _load(root, **options):
    return load_data("folder", root, image_size=16, **options)


def test_classes_are_sorted_and_files_found(root):
    (root / "train" / "ant" / "deeper").mkdir()
    Image.new("L", (20, 20), 7).save(root / "train" / "ant" / "deeper" / "grey.JPEG")
    bundle = _load(root)
    assert bundle.class_names == ("ant", "bee", "cat")
    assert (bundle.num_classes, bundle.input_shape) == (3, (3, 16, 16))
    assert bundle.train.labels.tolist() == [0] * 5 + [1] * 4 + [2] * 4
    image, label = bundle.train[4, 0]
    assert (image.shape, image.dtype, label) == ((3, 16, 16), torch.uint8, 0)


def test_test_images_are_resized_and_cut_in_the_middle(root):
    path = root / "val" / "ant" / "0.png"
    image = Image.new("RGB", (64, 32), (0, 0, 0))
    image.paste((255, 0, 0), (16, 0, 48, 32))
    image.save(path)
    pixels, _ = _load(root).test[0, 0]
    assert pixels.shape == (3, 16, 16)
    assert pixels[0].min() == 255
    assert pixels[1].max() == 0


@pytest.mark.parametrize("shape", [(64, 64), (37, 91), (80, 33), (9, 300)])
def test_crops_are_those_of_torchvision(root, shape):
    from torchvision.transforms.v2 import functional as transforms

    pixels = torch.randint(256, (shape[1], shape[0], 3), dtype=torch.uint8)
    image = Image.fromarray(pixels.numpy())
    image.save(root / "train" / "ant" / "0.png")
    centre = transforms.center_crop(transforms.resize(image, [18]), [16])
    assert torch.equal(_load(root, augment=False).train[0, 0][0], transforms.pil_to_tensor(centre))
    chance = random.Random(5)
    box = random_box(shape[1], shape[0], chance)
    crop = transforms.resized_crop(image, *box, [16, 16])
    if chance.random() < 0.5:
        crop = transforms.horizontal_flip(crop)
    assert torch.equal(_load(root).train[0, 5][0], transforms.pil_to_tensor(crop))


def test_training_crops_depend_on_seed_and_draw_alone(root):
    path = root / "train" / "ant" / "0.png"
    pixels = torch.arange(64 * 64 * 3, dtype=torch.int64).view(64, 64, 3).to(torch.uint8)
    Image.fromarray(pixels.numpy()).save(path)
    before = torch.get_rng_state()
    train = _load(root).train
    first, second = train[0, 5][0], train[0, 6][0]
    assert torch.equal(first, _load(root).train[0, 5][0])
    assert not torch.equal(first, second)
    assert not torch.equal(first, _load(root, seed=1).train[0, 5][0])
    assert torch.equal(_load(root, augment=False).train[0, 5][0], _load(root, augment=False).train[0, 6][0])
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_come_in_the_given_order_and_again(root, workers):
    train = _load(root).train
    loader = BatchLoader(train, workers=workers)
    before = torch.get_rng_state()
    order = torch.tensor([[0, 11], [5, 3], [8, 8]])
    draws = torch.arange(6).view(3, 2)
    for start in (0, 1):
        got = list(loader.batches(order[start:], draws[start:]))
        assert len(got) == 3 - start
        for (images, labels), indices, numbers in zip(got, order[start:], draws[start:], strict=True):
            assert torch.equal(labels, train.labels[indices])
            for image, index, draw in zip(images, indices.tolist(), numbers.tolist(), strict=True):
                assert torch.equal(image, train[index, draw][0])
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_image_is_named_when_its_batch_comes(root, workers):
    path = root / "train" / "cat" / "2.png"
    path.write_bytes(path.read_bytes()[:60])
    train = _load(root).train
    broken = 4 + 4 + 2
    assert isinstance(train[broken, 0], BrokenImage)
    batches = BatchLoader(train, workers=workers).batches(torch.tensor([[0], [broken]]), torch.zeros(2, 1))
    with pytest.raises(DataError, match=r"Got .*cat/2\.png, which is not"):
        list(batches)


def test_an_image_that_cannot_be_resized_is_named(root, monkeypatch):
    def odd(*_):
        raise ValueError("height and width must be > 0")

    train = _load(root).train
    monkeypatch.setattr("softprune.lab.data.images.random_box", odd)
    assert train[10, 0] == BrokenImage(str(root / "train" / "cat" / "2.png"), "height and width must be > 0")


def _killed(items):
    os._exit(9)


def _failing(items):
    raise MemoryError("no room for a batch")


@pytest.mark.parametrize(
    ("workers", "collate", "found"),
    [
        (0, _failing, r"Got MemoryError: no room for a batch\."),
        (1, _failing, r"Got MemoryError: MemoryError: no room for a batch\."),
        (1, _killed, r"Got RuntimeError: DataLoader worker .* exited unexpectedly\. If a loader"),
    ],
)
def test_whatever_stops_the_loader_is_an_error_of_the_data(root, monkeypatch, workers, collate, found):
    monkeypatch.setattr("softprune.lab.data.loader.collate", collate)
    loader = BatchLoader(_load(root).train, workers=workers)
    with pytest.raises(DataError, match=found):
        list(loader.batches(torch.tensor([[0], [1]]), torch.zeros(2, 1)))


def _closed_terminal(items, collate=loader.collate):
    for number in (signal.SIGINT, signal.SIGHUP):
        os.kill(os.getpid(), number)
    return collate(items)


def test_what_a_terminal_sends_does_not_stop_the_loader(root, monkeypatch):
    monkeypatch.setattr("softprune.lab.data.loader.collate", _closed_terminal)
    batches = BatchLoader(_load(root).train, workers=1).batches(torch.tensor([[0], [1]]), torch.zeros(2, 1))
    assert len(list(batches)) == 2


def test_a_missing_split(root):
    (root / "val").rename(root / "validation")
    with pytest.raises(DataError, match=r"Got no .*val; .* holds train, validation"):
        _load(root)
    with pytest.raises(DataError, match="must exist"):
        _load(root / "nowhere")
    with pytest.raises(DataError, match="--data-dir"):
        load_data("folder")


def test_an_empty_class(root, caplog):
    for path in (root / "val" / "bee").iterdir():
        path.rename(path.with_suffix(".txt"))
    with pytest.raises(DataError, match=r"Every class needs at least one image.*val/bee"):
        _load(root)


def test_files_that_are_no_images_are_reported(root, caplog):
    for name in ("notes.txt", "._0.png"):
        (root / "train" / "ant" / name).write_text("x")
    with caplog.at_level(logging.WARNING):
        assert len(_load(root).train) == 12
    assert "ignoring 2 files" in caplog.text


def test_classes_that_differ_between_splits(root):
    (root / "val" / "cat").rename(root / "val" / "dog")
    with pytest.raises(DataError, match="Got cat only in train and dog only in val"):
        _load(root)


def test_no_classes(root):
    for path in (root / "val").iterdir():
        path.rename(path.with_name("." + path.name))
    with pytest.raises(DataError, match="one folder per class"):
        _load(root)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(4, 3, 5, 7), (2, 1, 5, 7), (3, 5, 7)])
@pytest.mark.parametrize("channels_last", [True, False])
def test_normalisation_in_either_memory_order(dtype, shape, channels_last):
    pixels = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    if channels_last:
        pixels = pixels.movedim(-3, -1).contiguous().movedim(-1, -3)
    mean, std = (torch.tensor(values[: shape[-3]]).view(-1, 1, 1) for values in ((100.0, 110, 120), (50.0, 60, 70)))
    before = pixels.clone()
    found = normalised(pixels, mean, std)
    assert torch.equal(found, (pixels.to(torch.float32) - mean) / std)
    assert found.dtype == torch.float32
    assert torch.equal(pixels, before)


def test_erasing_depends_on_the_draw_and_leaves_test_images_alone(root):
    plain, erased = _load(root), _load(root, erasing=1.0)
    assert torch.equal(plain.test[0, 0][0], erased.test[0, 0][0])
    mean = torch.tensor([124, 116, 104], dtype=torch.uint8).view(3, 1, 1)
    places = set()
    for draw in range(5):
        before, after = plain.train[0, draw][0], erased.train[0, draw][0]
        changed = (before != after).any(0)
        assert changed.any()
        assert torch.equal(after[:, changed], mean.expand_as(after)[:, changed])
        assert torch.equal(erased.train[0, draw][0], after)
        places.add(tuple(changed.flatten().tolist()))
    assert len(places) == 5


def test_without_pillow_or_torchvision(root, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torchvision", None)
    assert len(_load(root).train) == 12
    with pytest.raises(DataError, match=r"data\.randaugment.*pip install torchvision"):
        _load(root, randaugment=9)
    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
    with pytest.raises(DataError, match="pip install pillow"):
        _load(root)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("operator torchvision::nms does not exist"), OSError("libtorch.so: undefined symbol")],
    ids=["operator", "symbol"],
)
def test_a_torchvision_of_another_torch(root, monkeypatch, error):
    importing = importlib.import_module

    def broken(name):
        if name == "torchvision":
            raise error
        return importing(name)

    monkeypatch.setattr(importlib, "import_module", broken)
    monkeypatch.setattr("softprune.lab.data.folder.version", lambda package: "0.1.2")
    with pytest.raises(DataError, match=rf"torchvision 0\.1\.2 with torch {re.escape(torch.__version__)}: .*matches"):
        _load(root, randaugment=9)


def test_links_that_lead_back_and_fifos_are_ignored(root, caplog):
    bee = root / "train" / "bee"
    (bee / "loop").symlink_to(bee, target_is_directory=True)
    (bee / "gone.png").symlink_to(root / "nothing.png")
    (bee / "self.png").symlink_to("self.png")
    os.mkfifo(bee / "pipe.png")
    elsewhere = root / "elsewhere"
    elsewhere.mkdir()
    Image.new("RGB", (20, 20)).save(elsewhere / "x.png")
    (bee / "more").symlink_to(elsewhere, target_is_directory=True)
    with caplog.at_level(logging.WARNING):
        train = _load(root).train
    assert train.labels.tolist() == [0] * 4 + [1] * 5 + [2] * 4
    assert "ignoring 4 files that are not images" in caplog.text
    assert "loop" in caplog.text


def test_folders_that_lead_to_each_other_are_walked_once(root):
    """Nine folders with links to all others have a million ways through them."""
    bee = root / "train" / "bee"
    for name in "abcdefghi":
        (bee / name).mkdir()
        Image.new("RGB", (20, 20)).save(bee / name / "x.png")
        for other in "abcdefghi":
            (bee / name / f"to-{other}").symlink_to(bee / other, target_is_directory=True)
    assert _load(root).train.labels.tolist() == [0] * 4 + [1] * 13 + [2] * 4


def test_a_decoder_is_chosen_from_the_common_ones_alone(root):
    """Pillow's EPS decoder starts Ghostscript, whatever the file is called."""
    Image.new("RGB", (20, 20)).save(root / "train" / "ant" / "0.png", format="EPS")
    item = _load(root).train[0, 0]
    assert isinstance(item, BrokenImage)
    assert item.reason.startswith("it is not an image that can be read (JPEG, PNG")


def _encoded(values, kind, **options):
    file = io.BytesIO()
    Image.fromarray(values).save(file, kind, **options)
    return file.getvalue()


_RAMP = np.arange(0, 65536, 65, dtype=np.uint16).reshape(1, -1)
_RAMP_PGM = b"P5 %d 1 65535\n" % _RAMP.size + _RAMP.astype(">u2").tobytes()


@pytest.mark.parametrize(
    "content",
    [_encoded(_RAMP, "PNG"), _encoded(_RAMP, "TIFF"), _encoded(_RAMP.byteswap().view(">u2"), "TIFF"), _RAMP_PGM],
)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_of_16_bits_the_upper_eight_are_taken(content, mode):
    pixels = np.asarray(decode_image(content, mode)).reshape(_RAMP.size, -1)
    assert (pixels == _RAMP.reshape(-1, 1) // 256).all()


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_pixels_without_a_range_are_refused(dtype):
    with pytest.raises(DataError, match=r"32 bits and no known range \(mode [IF]\); save it with 8 or 16 bits"):
        decode_image(_encoded(_RAMP.astype(dtype), "TIFF"))


@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA", "CMYK", "P", "1"])
def test_images_are_decoded_as_torchvision_decodes_them(tmp_path, mode):
    """EXIF's orientation included, which its ImageFolder does not apply."""
    from torchvision.datasets.folder import default_loader

    path = tmp_path / ("image.jpg" if mode == "CMYK" else "image.png")
    turned = Image.Exif()
    turned[0x112] = 6
    ramp = Image.fromarray(np.arange(24 * 16, dtype=np.uint8).reshape(16, 24)).convert("RGB")
    ramp.convert(mode).save(path, exif=turned)
    decoded = decode_image(path.read_bytes())
    assert decoded.size == (24, 16)
    assert decoded.tobytes() == default_loader(path).tobytes()


def test_a_palette_with_transparency_has_its_colours_and_no_warning(recwarn):
    colours = Image.fromarray(np.arange(0, 256, 4, dtype=np.uint8).reshape(8, 8)).convert("RGB").quantize(64)
    file = io.BytesIO()
    colours.save(file, "PNG", transparency=bytes(range(64)))
    assert decode_image(file.getvalue()).tobytes() == colours.convert("RGB").tobytes()
    assert not recwarn.list


@pytest.mark.parametrize(
    ("size", "says"), [((9_000, 9_000), "more than 67,108,864"), ((1, 65_000), "too different for a square")]
)
def test_a_small_file_does_not_choose_how_much_memory_is_used(root, size, says):
    """A PNG of a few kilobytes can unpack to gigabytes, and a line of pixels would be resized to as many."""
    path = root / "val" / "ant" / "0.png"
    Image.new("1", size).save(path)
    assert path.stat().st_size < 100_000
    item = load_data("folder", root, image_size=224).test[0, 0]
    assert isinstance(item, BrokenImage)
    assert says in item.reason


def test_fewer_loader_processes_than_asked_for_are_logged_once(caplog):
    loader._at_most_cores.cache_clear()
    with caplog.at_level("INFO"):
        counts = [loader._at_most_cores(100_000) for _ in range(3)]
    assert len(set(counts)) == 1
    assert counts[0] <= os.cpu_count()
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [f"using {counts[0]} loader processes"]
