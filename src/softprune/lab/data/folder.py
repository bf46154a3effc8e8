"""Find the images of a folder in the ImageNet layout: ROOT/train/CLASS/*.jpeg and ROOT/val/CLASS/*.jpeg."""

import os
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from softprune.errors import DataError, first_few
from softprune.factories import import_optional
from softprune.lab.data.datasets import DataBundle
from softprune.lab.data.images import Crops, FolderDataset
from softprune.log import get_logger

logger = get_logger(__name__)

SPLITS = ("train", "val")
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff"})


def load_folder(root: Path | str, crops: Crops) -> DataBundle:
    """Return both splits of the folder `root`. Only file names are read; images are opened when their batch is due."""
    root = Path(root)
    classes, splits = scan_folder(root)
    parts = (
        FolderDataset(root / split, np.array(files), torch.tensor(labels), crops)
        for split, (files, labels) in splits.items()
    )
    return DataBundle.of_files("folder", parts, tuple(classes))


def scan_folder(root: Path) -> tuple[list[str], dict[str, tuple[list[bytes], list[int]]]]:
    """Return the classes of a folder and, for each split, paths below it and labels."""
    classes = {split: _classes(root, split) for split in SPLITS}
    train_only = sorted(set(classes["train"]) - set(classes["val"]))
    val_only = sorted(set(classes["val"]) - set(classes["train"]))
    if train_only or val_only:
        raise DataError(
            f"{root}/train and {root}/val must have the same class folders. "
            f"Got {first_few(train_only) or 'none'} only in train and {first_few(val_only) or 'none'} only in val; "
            "give each class images in both, or remove it."
        )
    return classes["train"], {split: _scan(root / split, classes[split]) for split in SPLITS}


def image_files(paths: Iterable[Path]) -> list[Path]:
    """Return the files among ``paths``, and the images in the folders among them."""
    files: list[Path] = []
    for path in paths:
        found = [Path(file) for file, is_image in _walk(path) if is_image] if path.is_dir() else [path]
        if not found:
            raise DataError(f"A folder to classify must hold images ({', '.join(sorted(SUFFIXES))}). Got {path}.")
        files += found
    return files


def require_decoder(randaugment: int = 0) -> None:
    """Raise a DataError unless Pillow can be imported, and torchvision where RandAugment needs it."""
    import_optional("PIL.Image", "Decoding images in files", "pillow", DataError)
    if not randaugment:
        return
    try:
        import_optional("torchvision", "data.randaugment", error=DataError)
    except (RuntimeError, OSError, AttributeError) as error:  # its compiled part does not fit this PyTorch
        raise DataError(
            "data.randaugment is torchvision's RandAugment, which must be built for the PyTorch that is installed. "
            f"Got torchvision {version('torchvision')} with torch {torch.__version__}: {error}. Install the "
            "torchvision that matches this torch (https://pytorch.org/get-started/previous-versions lists the pairs)."
        ) from error


def _classes(root: Path, split: str) -> list[str]:
    """Return the class folders of a split, in order."""
    folder = root / split
    if not folder.is_dir():
        if not root.is_dir():
            raise DataError(f"The folder of images must exist. Got {root}; check --data-dir (`root`).")
        here = sorted(entry.name for entry in root.iterdir())
        raise DataError(
            f"Images in folders need {root}/train and {root}/val, each with one folder per class. "
            f"Got no {folder}; {root} holds {first_few(here) or 'nothing'}. Rename your folders, or link them there."
        )
    classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not classes:
        raise DataError(f"{folder} must have one folder per class. Got none.")
    return classes


def _scan(folder: Path, classes: list[str]) -> tuple[list[bytes], list[int]]:
    """Return paths below `folder` and labels, in an order that does not depend on the file system."""
    files: list[bytes] = []
    labels: list[int] = []
    ignored: list[str] = []
    for label, name in enumerate(classes):
        found: list[str] = []
        for path, is_image in _walk(folder / name):
            (found if is_image else ignored).append(os.path.relpath(path, folder))
        if not found:
            raise DataError(
                f"Every class needs at least one image ({', '.join(sorted(SUFFIXES))}). Got none in "
                f"{folder / name}: add images, or remove the folder from every split."
            )
        files.extend(os.fsencode(path) for path in found)
        labels.extend([label] * len(found))
    if ignored:
        logger.warning(
            "softprune: %s: ignoring %d files that are not images: %s", folder, len(ignored), first_few(ignored, 5)
        )
    return files, labels


def _walk(root: Path) -> Iterator[tuple[str, bool]]:
    """Yield every file below `root` in order, and whether it is an image.

    Links to folders are followed, except to a folder that was seen: folders that lead to each other would repeat their
    images without end. Only regular files are images: opening a fifo or a device would block.
    """

    def refuse(error: OSError) -> None:
        raise DataError(f"Every folder of images must be readable. Got {error.filename}: {error.strerror}.") from error

    seen: set[tuple[int, int]] = set()
    for folder, subfolders, files in os.walk(root, followlinks=True, onerror=refuse):
        info = os.stat(folder)
        if (info.st_dev, info.st_ino) in seen:
            subfolders.clear()
            yield folder, False
            continue
        seen.add((info.st_dev, info.st_ino))
        subfolders.sort()
        for name in sorted(files):
            path = os.path.join(folder, name)
            # A hidden file is not the user's: macOS adds "._NAME.jpg", which holds no image, to archives.
            yield path, name[0] != "." and os.path.splitext(name)[1].lower() in SUFFIXES and os.path.isfile(path)
