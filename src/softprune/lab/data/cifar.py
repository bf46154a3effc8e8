"""CIFAR-10 and CIFAR-100 from the official Python files (https://www.cs.toronto.edu/~kriz/cifar.html).

The files are pickles, and pickle.load can call any function that a file names. The unpickler here accepts only the
names that describe NumPy arrays and does not call them. Arrays are built from their bytes afterwards and must be uint8,
since NumPy would follow the bytes of an object array as pointers.
"""

import io
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from softprune.errors import DataError
from softprune.io import read_bytes


class Cifar(NamedTuple):
    """File names and normalisation constants of CIFAR-10 or CIFAR-100."""

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
"""Images (N, 3, 32, 32), uint8, and labels (N,), int64."""


def read_cifar(cifar: Cifar, root: Path) -> tuple[Part, Part, tuple[str, ...]]:
    """Return training part, test part and class names. `root` contains the official files or their folder."""
    wanted = (*cifar.train_files, cifar.test_file, cifar.meta_file)
    folder = root if (root / cifar.meta_file).is_file() else root / cifar.folder
    missing = [file for file in wanted if not (folder / file).is_file()]
    if missing:
        archive = cifar.name.replace("cifar", "cifar-") + "-python.tar.gz"
        raise DataError(
            f"{cifar.name} needs the official Python files {', '.join(wanted)} in {folder}. Got a folder without "
            f"{', '.join(missing)}. Unpack https://www.cs.toronto.edu/~kriz/{archive} in {root} with `tar xzf`, "
            "or give its folder with --data-dir (`root` of load_data)."
        )
    *contents, meta = (read_pickle(folder / file) for file in wanted)
    try:
        images = [content["data"].reshape(-1, 3, 32, 32).copy() for content in contents]
        kind = "fine_label" if cifar is CIFAR100 else "label"  # CIFAR-100 also has coarse labels
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
    """Placeholder for an object in a pickle: records constructor arguments and state without calling anything."""

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
    """Return the dictionary in a pickle of plain data and uint8 arrays, without running any code of the file."""
    try:
        content = _Unpickler(io.BytesIO(read_bytes(path)), encoding="bytes").load()
        return {_text(key): _array(value) if isinstance(value, _Named) else value for key, value in content.items()}
    except Exception as error:  # a damaged pickle raises nearly anything
        raise DataError(
            f"{path} must be a pickle of a dictionary of plain data and arrays of uint8. Got "
            f"{error or type(error).__name__}: the file is damaged or not an official one. Unpack it again."
        ) from error


def _array(value: _Named) -> np.ndarray:
    _, shape, dtype, is_fortran, content = value.state
    if dtype.arguments[0] not in ("u1", b"u1"):
        raise pickle.UnpicklingError("an array with a dtype other than uint8")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape, order="F" if is_fortran else "C")
