"""CIFAR-10 and CIFAR-100 from the official Python files (https://www.cs.toronto.edu/~kriz/cifar.html)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from softprune.errors import DataError
from softprune.lab.data.datasets import ArrayDataset, Augmentation, DataBundle
from softprune.lab.data.download import fetch_archive
from softprune.lab.data.pickles import read_pickle

_SIDE = 32


@dataclass(frozen=True, kw_only=True)
class Cifar:
    """One of the two data sets: its files, their content, and the normalisation of its pixels."""

    name: str
    num_classes: int
    url: str
    sha256: str
    folder: str
    train_files: tuple[str, ...]
    test_files: tuple[str, ...]
    meta_file: str
    label_key: str
    names_key: str
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    train_images: int = 50_000
    test_images: int = 10_000


CIFAR10 = Cifar(
    name="cifar10",
    num_classes=10,
    url="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
    sha256="6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
    folder="cifar-10-batches-py",
    train_files=tuple(f"data_batch_{i}" for i in range(1, 6)),
    test_files=("test_batch",),
    meta_file="batches.meta",
    label_key="labels",
    names_key="label_names",
    mean=(125.3, 123.0, 113.9),
    std=(63.0, 62.1, 66.7),
)
CIFAR100 = Cifar(
    name="cifar100",
    num_classes=100,
    url="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
    sha256="85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
    folder="cifar-100-python",
    train_files=("train",),
    test_files=("test",),
    meta_file="meta",
    label_key="fine_labels",
    names_key="fine_label_names",
    mean=(129.3, 124.1, 112.4),
    std=(68.2, 65.4, 70.4),
)


def load_cifar(cifar: Cifar, root: Path | str, *, download: bool = False) -> DataBundle:
    """Return the whole set. `root` is the folder with the official files, or its parent."""
    folder = _find(cifar, Path(root), download)
    names = _read(folder / cifar.meta_file).get(cifar.names_key)
    if not isinstance(names, list) or len(names) != cifar.num_classes:
        raise DataError(
            f"{folder / cifar.meta_file} must list {cifar.num_classes} class names. Got {_summary(names)}; "
            f"unpack {cifar.url} again."
        )

    def part(files: tuple[str, ...], count: int) -> ArrayDataset:
        images, labels = _images(cifar, [folder / file for file in files], count)
        return ArrayDataset.from_arrays(images, labels, mean=cifar.mean, std=cifar.std)

    return DataBundle(
        name=cifar.name,
        num_classes=cifar.num_classes,
        input_shape=(3, _SIDE, _SIDE),
        train=part(cifar.train_files, cifar.train_images),
        test=part(cifar.test_files, cifar.test_images),
        augmentation=Augmentation(pad=4, flip=True),
        class_names=tuple(_text(name) for name in names),
    )


def _find(cifar: Cifar, root: Path, download: bool) -> Path:
    """Return the folder that holds every file of the set, downloaded if allowed."""
    wanted = (*cifar.train_files, *cifar.test_files, cifar.meta_file)
    for folder in (root / cifar.folder, root):
        if all((folder / file).is_file() for file in wanted):
            return folder
    if download:
        return fetch_archive(cifar.url, cifar.sha256, cifar.folder, root)
    folder = root if any((root / file).is_file() for file in wanted) else root / cifar.folder
    missing = [file for file in wanted if not (folder / file).is_file()]
    got = "none of them" if len(missing) == len(wanted) else f"a folder without {', '.join(missing)}"
    raise DataError(
        f"{cifar.name} needs the official Python files {', '.join(wanted)} in {folder}. Got {got}. "
        f"Download {cifar.url} (SHA-256 {cifar.sha256}) and unpack it in {root} with `tar xzf`, "
        "say where the unpacked folder is with --data-dir (load_data's `root`), or let softprune fetch it "
        "with --set data.download=true (load_data's `download=True`)."
    )


def _read(path: Path) -> dict[str, Any]:
    """Return the dictionary in an official file. Its keys are bytes in Python 2's pickles, and may be text."""
    content = read_pickle(path)
    if not isinstance(content, dict):
        raise DataError(f"{path} must hold a dictionary. Got {type(content).__name__}; fetch the file again.")
    return {_text(key): value for key, value in content.items()}


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def _summary(values: Any) -> str:
    if not isinstance(values, list):
        return type(values).__name__
    return f"{len(values)} of type {', '.join(sorted({type(value).__name__ for value in values[:100]}))}"


def _images(cifar: Cifar, paths: list[Path], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images (count, 3, 32, 32) uint8 and labels (count,) int64 of these files, checked."""
    images, labels = [], []
    for path in paths:
        content = _read(path)
        pixels, classes = content.get("data"), content.get(cifar.label_key)
        if not isinstance(pixels, np.ndarray):
            raise DataError(f"{path}: `data` must be an array. Got {type(pixels).__name__}; fetch it again.")
        if pixels.shape[1:] != (3 * _SIDE**2,):
            raise DataError(
                f"{path}: `data` must have the shape (n, {3 * _SIDE**2}). Got {pixels.shape}; fetch it again."
            )
        if not isinstance(classes, list) or len(classes) != len(pixels) or {*map(type, classes)} - {int}:
            raise DataError(
                f"{path}: `{cifar.label_key}` must hold {len(pixels)} whole numbers, one per image. "
                f"Got {_summary(classes)}; fetch it again."
            )
        if classes and not 0 <= min(classes) <= max(classes) < cifar.num_classes:
            raise DataError(
                f"{path}: labels must lie in 0 to {cifar.num_classes - 1}. "
                f"Got {min(classes)} to {max(classes)}; is this file of {cifar.name}?"
            )
        images.append(pixels.reshape(-1, 3, _SIDE, _SIDE))
        labels.append(np.array(classes, dtype=np.int64))
    total = sum(map(len, images))
    if total != count:
        raise DataError(
            f"{', '.join(path.name for path in paths)} in {paths[0].parent} must hold {count:,} images. "
            f"Got {total:,}; fetch the files again."
        )
    return np.concatenate(images), np.concatenate(labels)
