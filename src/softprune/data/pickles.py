"""Reading pickles that hold plain data and NumPy arrays, and nothing else.

A pickle is a program: the usual loader calls whatever the file names. Here a file can name only what is
listed below, with the arguments that NumPy and Python themselves write; the rest is refused before it runs.
"""

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from softprune.errors import DataError

# Taken from an array, since its module moved between NumPy 1 and 2.
_RECONSTRUCT: Any = np.empty(0).__reduce__()[0]


def _empty_array(kind: type, shape: tuple[int, ...], typecode: bytes | str) -> Any:
    """The empty array that NumPy's pickles then fill; nothing larger, nothing else."""
    if kind is not np.ndarray or tuple(shape) != (0,):
        raise pickle.UnpicklingError(f"an array of kind {kind} and shape {shape} where an empty one belongs")
    return _RECONSTRUCT(kind, shape, b"b")


def _array_of_buffer(buffer: bytes, dtype: np.dtype, shape: tuple[int, ...], order: Any) -> Any:
    """An array of pickle protocol 5."""
    return np.frombuffer(buffer, dtype=dtype).reshape(shape, order=order)


def _bytes_of_text(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes in old protocols."""
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"the encoding {encoding!r}")
    return text.encode("latin-1")


def _no_bytes() -> bytes:
    """How Python 3 writes b"" in old protocols; without arguments, since bytes(n) allocates n bytes."""
    return b""


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _empty_array,
    ("numpy._core.multiarray", "_reconstruct"): _empty_array,
    ("numpy.core.numeric", "_frombuffer"): _array_of_buffer,
    ("numpy._core.numeric", "_frombuffer"): _array_of_buffer,
    ("_codecs", "encode"): _bytes_of_text,
    ("__builtin__", "bytes"): _no_bytes,
    ("builtins", "bytes"): _no_bytes,
}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"the name {module}.{name}") from None


def read_pickle(path: Path) -> Any:
    """What the file holds, with Python 2's strings as bytes. DataError if it is damaged or not only data."""
    try:
        with path.open("rb") as file:
            return _PlainUnpickler(file, encoding="bytes").load()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    except Exception as error:  # a damaged pickle raises nearly anything
        raise DataError(
            f"{path} must be a pickle of plain data and NumPy arrays. "
            f"Got {error or type(error).__name__}: it is damaged or not what it claims to be. "
            "Delete it and fetch it again from its official source."
        ) from error
