"""CIFAR-10 and CIFAR-100 from the official Python files (https://www.cs.toronto.edu/~kriz/cifar.html).

They are pickles, which are programs: the usual loader calls whatever a file names. Here a file can name only what
describes an array. The array is made from its bytes afterwards, since an object dtype that a file describes would make
NumPy follow these bytes as pointers.
"""

import io
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from softprune.errors import DataError
from softprune.io import read_bytes


class Cifar(NamedTuple):
    """One of the two data sets: its files, their keys, and the normalisation of its pixels."""

    name: str
    num_classes: int
    folder: str
    train_files: tuple[str, ...]
    test_file: str
    meta_file: str
    labels: str
    """The key of the labels in a file."""
    names: str
    """The key of the classes' names in the meta file."""
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    sizes: tuple[int, int] = (50_000, 10_000)
    """Training and test images."""


# fmt: off
CIFAR10 = Cifar(
    "cifar10", 10, "cifar-10-batches-py", tuple(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta",
    "labels", "label_names", mean=(125.3, 123.0, 113.9), std=(63.0, 62.1, 66.7),
)
CIFAR100 = Cifar(
    "cifar100", 100, "cifar-100-python", ("train",), "test", "meta", "fine_labels", "fine_label_names",
    mean=(129.3, 124.1, 112.4), std=(68.2, 65.4, 70.4),
)
# fmt: on

Part = tuple[np.ndarray, np.ndarray]
"""Images (N, 3, 32, 32) in uint8, and labels."""


def read_cifar(cifar: Cifar, root: Path) -> tuple[tuple[Part, Part], tuple[str, ...]]:
    """Return training images, test images and names of the classes. `root` has the official files or their folder."""
    wanted = (*cifar.train_files, cifar.test_file, cifar.meta_file)
    folder = root if (root / cifar.meta_file).is_file() else root / cifar.folder
    missing = [file for file in wanted if not (folder / file).is_file()]
    if missing:
        archive = cifar.name.replace("cifar", "cifar-") + "-python.tar.gz"
        raise DataError(
            f"{cifar.name} needs the official Python files {', '.join(wanted)} in {folder}. Got a folder without "
            f"{', '.join(missing)}. Unpack https://www.cs.toronto.edu/~kriz/{archive} in {root} with `tar xzf`, "
            "or say where it is unpacked with --data-dir (load_data's `root`)."
        )
    names = read_pickle(folder / cifar.meta_file).get(cifar.names)
    if not isinstance(names, list) or len(names) != cifar.num_classes:
        raise DataError(f"{folder / cifar.meta_file} must list {cifar.num_classes} class names. Unpack it again.")
    images, labels = zip(*(_images(cifar, folder / file) for file in cifar.train_files), strict=True)
    parts = (np.concatenate(images), np.concatenate(labels)), _images(cifar, folder / cifar.test_file)
    found = len(parts[0][1]), len(parts[1][1])
    if found != cifar.sizes:
        raise DataError(
            "{} in {} must hold {:,} and {:,} images. Got {:,} and {:,}; unpack them again.".format(
                cifar.name, folder, *cifar.sizes, *found
            )
        )
    return parts, tuple(map(_text, names))


def _images(cifar: Cifar, path: Path) -> Part:
    content = read_pickle(path)
    pixels, labels = content.get("data"), content.get(cifar.labels)
    if not (
        isinstance(pixels, np.ndarray)
        and pixels.shape[1:] == (3 * 32 * 32,)
        and isinstance(labels, list)
        and len(labels) == len(pixels)
        and all(type(each) is int and 0 <= each < cifar.num_classes for each in labels)
    ):
        raise DataError(
            f"{path} must hold `data`, 3,072 bytes for each image, and `{cifar.labels}`, a number below "
            f"{cifar.num_classes} for each. Unpack the file again; is it of {cifar.name}?"
        )
    return pixels.reshape(-1, 3, 32, 32).copy(), np.array(labels, dtype=np.int64)


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


class _Plain:
    """What a pickle names: a type, or a call with its arguments and the state that the file gives to its result."""

    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Array(_Plain):
    """An empty array; its state is (version, shape, dtype, is_fortran, bytes)."""


_NAMES = {("numpy", "ndarray"): _Plain, ("numpy", "dtype"): _Plain} | {
    (f"numpy.{core}.multiarray", "_reconstruct"): _Array
    for core in ("core", "_core")  # renamed in NumPy 2
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _NAMES[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"the name {module}.{name}") from None


def read_pickle(path: Path) -> Any:
    """Return the dictionary in a pickle of plain data, bytes and arrays of bytes. Nothing that it names is called."""
    try:
        content = _Unpickler(io.BytesIO(read_bytes(path)), encoding="bytes").load()
        return {
            _text(key): _array(*value.state) if isinstance(value, _Array) else value for key, value in content.items()
        }
    except Exception as error:  # a damaged pickle raises nearly anything
        raise DataError(
            f"{path} must be a pickle of a dictionary of plain data and arrays of uint8. Got "
            f"{error or type(error).__name__}: it is damaged or not what it claims to be. Unpack it again."
        ) from error


def _array(version: int, shape: tuple[int, ...], dtype: _Plain, fortran: bool, content: bytes) -> np.ndarray:
    if dtype.arguments[0] not in ("u1", b"u1"):
        raise pickle.UnpicklingError("an array of other elements than uint8")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape, order="F" if fortran else "C")
