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
    """One of the two data sets: its files, and the normalisation of its pixels."""

    name: str
    folder: str
    train_files: tuple[str, ...]
    test_file: str
    meta_file: str
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


# fmt: off
CIFAR10 = Cifar(
    "cifar10", "cifar-10-batches-py", tuple(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta",
    mean=(125.3, 123.0, 113.9), std=(63.0, 62.1, 66.7),
)
CIFAR100 = Cifar(
    "cifar100", "cifar-100-python", ("train",), "test", "meta",
    mean=(129.3, 124.1, 112.4), std=(68.2, 65.4, 70.4),
)
# fmt: on

Part = tuple[np.ndarray, np.ndarray]
"""Images (N, 3, 32, 32) in uint8, and labels."""


def read_cifar(cifar: Cifar, root: Path) -> tuple[Part, Part, tuple[str, ...]]:
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
    *contents, meta = (read_pickle(folder / file) for file in wanted)
    try:
        images = [content["data"].reshape(-1, 3, 32, 32).copy() for content in contents]
        kind = "fine_label" if cifar is CIFAR100 else "label"  # there are coarse ones, too
        labels = [np.array(content[f"{kind}s"], dtype=np.int64) for content in contents]
        names = tuple(map(_text, meta[f"{kind}_names"]))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise DataError(
            f"{folder} must hold the official files of {cifar.name}. Got {error!r} in one of them; unpack them again."
        ) from error
    return (np.concatenate(images[:-1]), np.concatenate(labels[:-1])), (images[-1], labels[-1]), names


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


class _Named:
    """What a pickle names, uncalled: the arguments of the call, and the state that the file gives to its result."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


_NAMES = {"numpy.ndarray", "numpy.dtype"}
_NAMES |= {f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")}  # renamed in NumPy 2


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in _NAMES:
            raise pickle.UnpicklingError(f"the name {module}.{name}")
        return _Named


def read_pickle(path: Path) -> dict[str, Any]:
    """Return the dictionary in a pickle of plain data, bytes and arrays of bytes. Nothing that it names is called."""
    try:
        content = _Unpickler(io.BytesIO(read_bytes(path)), encoding="bytes").load()
        return {_text(key): _array(value) if isinstance(value, _Named) else value for key, value in content.items()}
    except Exception as error:  # a damaged pickle raises nearly anything
        raise DataError(
            f"{path} must be a pickle of a dictionary of plain data and arrays of uint8. Got "
            f"{error or type(error).__name__}: it is damaged or not what it claims to be. Unpack it again."
        ) from error


def _array(value: _Named) -> np.ndarray:
    _, shape, dtype, is_fortran, content = value.state
    if dtype.arguments[0] not in ("u1", b"u1"):
        raise pickle.UnpicklingError("an array of other elements than uint8")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape, order="F" if is_fortran else "C")
