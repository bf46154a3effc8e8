"""Images in files that are decoded once and kept on the device."""

import random

import pytest
import torch

from softprune.errors import DataError
from softprune.lab.data import ArrayDataset, load_data
from softprune.lab.data.augment import CROP_TRIES, random_box, random_boxes, resized_crops
from softprune.lab.data.batches import EpochSampler, augmented_batch, image_words, make_batches
from softprune.lab.data.datasets import Augmentation
from softprune.rng import Clock

Image = pytest.importorskip("PIL.Image", reason='the "vision" extra is not installed')


@pytest.fixture
def root(tmp_path):
    chance = torch.Generator().manual_seed(0)
    for split, count in {"train": 5, "val": 2}.items():
        for name in ("ant", "bee"):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = torch.randint(256, (24, 32, 3), dtype=torch.uint8, generator=chance)
                Image.fromarray(pixels.numpy()).save(folder / f"{i}.png")
    return tmp_path


def _load(root, **options):
    return load_data("folder", root, image_size=16, **options)


@pytest.mark.parametrize("shape", [(64, 64), (37, 91), (80, 33), (9, 40)])
def test_resized_crops_are_those_of_pillow(shape):
    from PIL.Image import Resampling, Transpose

    pixels = torch.randint(256, (*shape, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    image, chance = Image.fromarray(pixels.numpy()), random.Random(3)
    boxes = [random_box(*shape, chance) for _ in range(20)]
    flipped = torch.arange(20) % 2 == 1
    batch = pixels.permute(2, 0, 1).expand(20, -1, -1, -1)
    crops = resized_crops(batch, torch.tensor(boxes, dtype=torch.float32).T, 24, flipped)
    for (top, left, height, width), flip, crop in zip(boxes, flipped, crops, strict=True):
        expected = image.crop((left, top, left + width, top + height)).resize((24, 24), Resampling.BILINEAR)
        expected = expected.transpose(Transpose.FLIP_LEFT_RIGHT) if flip else expected
        expected = torch.frombuffer(bytearray(expected.tobytes()), dtype=torch.uint8).view(24, 24, 3).permute(2, 0, 1)
        assert (crop - expected).abs().max() <= 1.01  # Pillow rounds to bytes, after each of its two passes


@pytest.mark.parametrize("shape", [(64, 64), (30, 40), (20, 64)])
def test_boxes_are_distributed_as_those_of_single_images(shape):
    count, chance = 4000, random.Random(0)
    single = torch.tensor([random_box(*shape, chance) for _ in range(count)], dtype=torch.float32).T
    u = torch.rand(2 + 2 * CROP_TRIES, count, generator=torch.Generator().manual_seed(0))
    boxes = random_boxes(*shape, u[:2], u[2:])
    top, left, height, width = boxes
    assert bool(((top >= 0) & (left >= 0) & (top + height <= shape[0]) & (left + width <= shape[1])).all())
    assert torch.equal(boxes, boxes.round())
    spread = single.std(1) / count**0.5
    assert bool(((boxes.mean(1) - single.mean(1)).abs() <= 6 * spread).all())
    assert torch.allclose(boxes.std(1), single.std(1), rtol=0.06)


def test_where_no_crop_fits_the_centre_is_taken():
    u = torch.zeros(2 + 2 * CROP_TRIES, 1)
    u[2:] = 1.0  # the whole area, and 4 to 3
    assert random_boxes(30, 30, u[:2], u[2:]).flatten().tolist() == [0, 0, 30, 30]
    assert random_boxes(90, 30, u[:2], u[2:]).flatten().tolist() == [25, 0, 40, 30]


def test_evaluation_sees_the_same_images_as_from_files(root):
    files, kept = _load(root, holdout=3), _load(root, holdout=3, in_memory=True)
    for name in ("test", "holdout"):
        part = getattr(kept, name)
        assert isinstance(part, ArrayDataset)
        for index in range(len(part)):
            image, label = getattr(files, name)[index, 0]
            assert torch.equal(part.images[index], image)
            assert int(part.labels[index]) == label
    assert (kept.input_shape, kept.num_classes, kept.class_names) == ((3, 16, 16), 2, ("ant", "bee"))
    assert kept.train.images.shape == (7, 3, 24, 32)
    assert torch.equal(kept.train.labels, files.train.labels)


def test_without_augmentation_training_images_are_those_from_files(root):
    files, kept = _load(root, augment=False), _load(root, augment=False, in_memory=True)
    assert torch.equal(kept.train.images, torch.stack([files.train[index, 0][0] for index in range(10)]))
    batches = make_batches(kept, EpochSampler(size=10, batch_size=5), device=torch.device("cpu"))
    assert batches.image_shape == (3, 16, 16)


def test_training_batches_are_crops_that_depend_on_seed_and_step(root):
    bundle = _load(root, in_memory=True, erasing=0.5)
    assert (bundle.augmentation.resize, bundle.augmentation.flip, bundle.augmentation.erasing) == (16, True, 0.5)
    batches = make_batches(bundle, EpochSampler(size=10, batch_size=8), device=torch.device("cpu"))
    assert batches.image_shape == (3, 16, 16)
    batches.begin(0, 0)
    (rows,) = batches.micro_batches(torch.tensor([0]))

    def batch(step):
        clock = Clock(0)
        clock.step.fill_(step)
        return batches.batch(*rows, clock)

    images, labels = batch(3)
    assert (images.shape, images.dtype) == ((8, 3, 16, 16), torch.float32)
    assert torch.equal(labels, bundle.train.labels[batches.sampler.indices(0)[0]])
    assert torch.equal(images, batch(3)[0])
    assert not torch.equal(images, batch(4)[0])
    assert (images == 0).all(1).any()  # erased


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::UserWarning:torch")  # Inductor's advice
def test_a_gpu_makes_the_same_crops_compiled(root):
    augmentation = Augmentation(resize=16, flip=True, erasing=0.5)
    batches = {}
    for device in ("cpu", "cuda"):
        data = _load(root, in_memory=True, device=device).train
        step = torch.compile(augmented_batch) if device == "cuda" else augmented_batch
        arguments = torch.arange(10, device=device), augmentation, Clock(0, device), image_words(0, 10, device)
        batches[device] = step(data, *arguments)[0].cpu()
    assert torch.allclose(batches["cuda"], batches["cpu"], atol=1e-4)


def test_images_of_several_sizes_are_refused(root):
    path = root / "train" / "bee" / "3.png"
    Image.new("RGB", (20, 10)).save(path)
    with pytest.raises(DataError, match=r"of one size .*bee/3\.png.* 20 x 10 pixels, the first one 32 x 24\. Resize"):
        _load(root, in_memory=True)
    path.write_bytes(b"no image")
    with pytest.raises(DataError, match=r"must be readable.*bee/3\.png"):
        _load(root, in_memory=True)


def test_what_needs_files_is_refused(root):
    with pytest.raises(DataError, match=r"without data\.randaugment.*Got data\.randaugment = 5"):
        _load(root, in_memory=True, randaugment=5)
    with pytest.raises(DataError, match=r"data\.in_memory needs images in files.*Got data\.name = 'own:data'"):
        load_data("own:data", in_memory=True)


def test_lack_of_memory_names_the_size(root, monkeypatch):
    empty = torch.empty

    def full(*shape, **options):
        if shape[0] == 10:
            raise RuntimeError("out of memory")
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(DataError, match=r"memory for all images on cpu\. Got 10 images of .*: out of memory\. Leave"):
        _load(root, in_memory=True)
