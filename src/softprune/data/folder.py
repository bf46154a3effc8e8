"""Images in folders, in the ImageNet layout: ROOT/train/CLASS/*.jpeg and ROOT/val/CLASS/*.jpeg."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from softprune.data.bundle import DataBundle
from softprune.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

log = logging.getLogger(__name__)

SPLITS = ("train", "val")
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff"})
# ImageNet's, in units of stored bytes.
MEAN = (123.675, 116.28, 103.53)
STD = (58.395, 57.12, 57.375)
# The usual ones: the crop's share of the image, and the ratio of its sides.
_CROP_AREA = (0.08, 1.0)
_CROP_RATIO = (3 / 4, 4 / 3)
_CROP_TRIES = 10


@dataclass(frozen=True)
class BrokenImage:
    """What a worker hands over in place of an image that it could not read."""

    path: str
    reason: str


class FolderDataset(torch.utils.data.Dataset[Any]):
    """One split of an image folder. An item is (uint8 image (3, size, size), label), or BrokenImage.

    Items are asked for as (index, draw): `draw` is the number of this look at an image since training began.
    With the seed it alone decides how the image is cropped and mirrored, so no generator has a state to save.
    """

    def __init__(
        self, root: Path, files: list[bytes], labels: list[int], *, size: int, seed: int, augment: bool
    ) -> None:
        self.root = root
        # One array, not a million Python strings, which forked workers would copy by counting references.
        self._files = np.array(files)
        self.labels = torch.tensor(labels, dtype=torch.int64)
        self.size, self.seed, self.augment = size, seed, augment

    def __len__(self) -> int:
        return len(self._files)

    def path(self, index: int) -> Path:
        """The file of an image."""
        return self.root / os.fsdecode(self._files[index])

    def __getitem__(self, item: tuple[int, int]) -> tuple[Tensor, int] | BrokenImage:
        from torchvision.transforms.v2 import functional as transforms

        index, draw = item
        path = self.path(index)
        try:
            image = _open(path)
            if self.augment:
                image = self._augmented(image, draw, transforms)
            else:
                image = evaluation_crop(image, self.size)
            return transforms.pil_to_tensor(image), int(self.labels[index])
        except MemoryError:
            raise  # not the image's fault
        except Exception as error:  # decoders raise nearly anything, resizing at odd shapes
            return BrokenImage(str(path), str(error) or type(error).__name__)

    def _augmented(self, image: Image, draw: int, transforms: Any) -> Image:
        chance = random.Random((self.seed << 64) + draw)
        top, left, height, width = _crop(image.height, image.width, chance)
        image = transforms.resized_crop(image, top, left, height, width, [self.size, self.size])
        return transforms.horizontal_flip(image) if chance.random() < 0.5 else image


def evaluation_crop(image: Image, size: int) -> Image:
    """Return the central square of an image, as the networks are tested on it."""
    from torchvision.transforms.v2 import functional as transforms

    return transforms.center_crop(transforms.resize(image, [round(size * 256 / 224)]), [size])


def _open(path: Path) -> Image:
    from PIL import Image

    with Image.open(path) as image:
        return image.convert("RGB")


def _crop(height: int, width: int, chance: random.Random) -> tuple[int, int, int, int]:
    """Top, left, height and width of a random crop: area and ratio as usual for ImageNet, else the middle."""
    for _ in range(_CROP_TRIES):
        area = height * width * chance.uniform(*_CROP_AREA)
        ratio = np.exp(chance.uniform(*np.log(_CROP_RATIO)))
        w, h = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 0 < w <= width and 0 < h <= height:
            return chance.randint(0, height - h), chance.randint(0, width - w), h, w
    w = min(width, round(height * _CROP_RATIO[1]))
    h = min(height, round(width / _CROP_RATIO[0]))
    return (height - h) // 2, (width - w) // 2, h, w


def collate(items: list[tuple[Tensor, int] | BrokenImage]) -> tuple[Tensor, Tensor] | BrokenImage:
    """A batch, or the first image of it that could not be read."""
    images, labels = [], []
    for item in items:
        if isinstance(item, BrokenImage):
            return item
        images.append(item[0])
        labels.append(item[1])
    return torch.stack(images), torch.tensor(labels)


def load_folder(
    root: Path | str, *, image_size: int = 224, seed: int = 0, augment: bool = True
) -> DataBundle:
    """Both splits of the folder `root`. Only names are read here; an image is opened when its batch comes."""
    _require_torchvision()
    root = Path(root)
    classes = {split: _classes(root, split) for split in SPLITS}
    train_only = sorted(set(classes["train"]) - set(classes["val"]))
    val_only = sorted(set(classes["val"]) - set(classes["train"]))
    if train_only or val_only:
        raise DataError(
            f"{root}/train and {root}/val must have the same class folders. "
            f"Got {_few(train_only) or 'none'} only in train and {_few(val_only) or 'none'} only in val."
        )
    parts = {}
    for split in SPLITS:
        files, labels = _scan(root / split, classes[split])
        parts[split] = FolderDataset(
            root / split, files, labels, size=image_size, seed=seed, augment=augment and split == "train"
        )
    return DataBundle(
        name="folder",
        num_classes=len(classes["train"]),
        input_shape=(3, image_size, image_size),
        train=parts["train"],
        test=parts["val"],
        class_names=tuple(classes["train"]),
    )


def _require_torchvision() -> None:
    try:
        import torchvision  # noqa: F401
    except ImportError as error:
        raise DataError(
            f"Images from folders are cropped by torchvision, which cannot be imported ({error}). "
            'Install it with `pip install "softprune[vision]"`.'
        ) from error
    except (RuntimeError, OSError, AttributeError) as error:  # its compiled part does not fit this PyTorch
        raise DataError(
            "Images from folders are cropped by torchvision, which must be built for the PyTorch that is installed. "
            f"Got torchvision {_installed('torchvision')} with torch {torch.__version__}: {error}. Install the "
            "torchvision that matches this torch (https://pytorch.org/get-started/previous-versions lists the pairs)."
        ) from error


def _installed(package: str) -> str:
    """The version of a package, also of one that cannot be imported."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "of unknown version"


def _classes(root: Path, split: str) -> list[str]:
    """The class folders of a split, in order."""
    folder = root / split
    if not folder.is_dir():
        here = sorted(entry.name for entry in root.iterdir()) if root.is_dir() else []
        raise DataError(
            f"Images in folders need {root}/train and {root}/val, each with one folder per class. "
            f"Got no {folder}; {root} holds {_few(here) or 'nothing'}."
        )
    classes = sorted(
        entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")
    )
    if not classes:
        raise DataError(f"{folder} must have one folder per class. Got none.")
    return classes


def _scan(folder: Path, classes: list[str]) -> tuple[list[bytes], list[int]]:
    """Paths below `folder` and labels, in an order that does not depend on the file system."""
    files: list[bytes] = []
    labels: list[int] = []
    ignored: list[str] = []
    for label, name in enumerate(classes):
        found: list[str] = []
        for parent, folders, names in os.walk(folder / name, followlinks=True):
            folders.sort()
            for file in sorted(names):
                path = os.path.join(os.path.relpath(parent, folder), file)
                (found if os.path.splitext(file)[1].lower() in SUFFIXES else ignored).append(path)
        if not found:
            raise DataError(
                f"Every class needs at least one image ({', '.join(sorted(SUFFIXES))}). Got none in "
                f"{folder / name}: add images, or remove the folder from every split."
            )
        files.extend(os.fsencode(path) for path in found)
        labels.extend([label] * len(found))
    if ignored:
        log.warning("%s: ignoring %d files that are no images: %s", folder, len(ignored), _few(ignored))
    return files, labels


def _few(names: Iterable[str], most: int = 5) -> str:
    """The first names of a list that may be long."""
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")
