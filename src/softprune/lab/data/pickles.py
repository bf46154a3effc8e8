"""Read pickles that hold plain data and arrays of bytes, as CIFAR's do, without executing them.

A pickle is a program: the usual loader calls whatever the file names. Here a file can name only the entries of a short
table, and none of them is NumPy's: an object dtype that a file describes through BUILD would make NumPy follow the
file's bytes as pointers. Arrays are described by plain records instead, and made from their bytes afterwards.
"""

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from softprune.errors import DataError


class _Record:
    """What a pickle says of a dtype or an array: arguments of its call, and the state that BUILD gives it."""

    def __init__(self, kind: str, *arguments: Any) -> None:
        self.kind, self.arguments, self.state = kind, arguments, None


def _records(kind: str) -> Callable[..., _Record]:
    return lambda *arguments: _Record(kind, *arguments)


def _bytes_of_text(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes in old protocols."""
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"the encoding {encoding!r}")
    return text.encode("latin-1")


def _no_bytes() -> bytes:
    """How Python 3 writes b"" in old protocols. Takes no arguments, since bytes(n) allocates n bytes."""
    return b""


_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "ndarray"): _records("class"),
    ("numpy", "dtype"): _records("dtype"),
    ("_codecs", "encode"): _bytes_of_text,
    ("__builtin__", "bytes"): _no_bytes,
    ("builtins", "bytes"): _no_bytes,
}
for _core in ("core", "_core"):  # NumPy 2 renamed the module
    _ALLOWED[f"numpy.{_core}.multiarray", "_reconstruct"] = _records("empty array")
    _ALLOWED[f"numpy.{_core}.numeric", "_frombuffer"] = _records("array of a buffer")


class _PlainUnpickler(pickle._Unpickler):  # type: ignore[name-defined,misc]
    """The loader in Python: the one in C allocates whatever a file names as the index of its memo."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)  # type: ignore[attr-defined]

    def load_bytearray8(self) -> None:
        # The original allocates the length that the file names before it reads.
        size = int.from_bytes(self.read(8), "little")  # type: ignore[attr-defined]
        self.append(bytearray(self.read(size)))  # type: ignore[attr-defined]

    dispatch[pickle.BYTEARRAY8[0]] = load_bytearray8

    def load_build(self) -> None:
        state = self.stack.pop()  # type: ignore[attr-defined]
        record = self.stack[-1]  # type: ignore[attr-defined]
        if not isinstance(record, _Record):  # an allowed name outlives the file
            raise pickle.UnpicklingError("a state for something else than an array")
        record.state = state

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"the name {module}.{name}") from None


def read_pickle(path: Path) -> Any:
    """Return what the file holds, with Python 2's strings as bytes.

    Arrays are found at the top level and among the values of a top-level dictionary. Raise a DataError if the file is
    damaged or holds anything else than plain data.
    """
    try:
        # Reading from memory returns what there is, whatever length the file names.
        content = _PlainUnpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        if type(content) is dict:
            return {key: _converted(value) for key, value in content.items()}
        return _converted(content)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. Check the path and its permissions.") from error
    except Exception as error:  # a damaged pickle raises nearly anything
        raise DataError(
            f"{path} must be a pickle of plain data and arrays of uint8. "
            f"Got {error or type(error).__name__}: it is damaged or not what it claims to be. "
            "Delete it and fetch it again from its official source."
        ) from error


def _converted(value: Any) -> Any:
    if not isinstance(value, _Record) and not callable(value):
        return value
    if isinstance(value, _Record) and value.kind == "empty array":
        # (version, shape, dtype, is_fortran, bytes)
        _, shape, dtype, fortran, content = _unpacked(value.state, 5)
        return _array(content, dtype, shape, "F" if fortran else "C")
    if isinstance(value, _Record) and value.kind == "array of a buffer":
        content, dtype, shape, order = _unpacked(value.arguments, 4)
        return _array(content, dtype, shape, order)
    raise pickle.UnpicklingError("a NumPy object that is not an array")


def _array(content: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray:
    if not isinstance(content, bytes | bytearray) or order not in ("C", "F"):
        raise pickle.UnpicklingError("an array without bytes")
    if not isinstance(shape, tuple) or not all(type(size) is int and size >= 0 for size in shape):
        raise pickle.UnpicklingError(f"an array of shape {shape!r}")
    if not isinstance(dtype, _Record) or dtype.kind != "dtype" or dtype.arguments[:1] not in (("u1",), (b"u1",)):
        raise pickle.UnpicklingError("an array of other elements than uint8")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape, order=order)


def _unpacked(values: Any, count: int) -> tuple[Any, ...]:
    if not isinstance(values, tuple) or len(values) != count:
        raise pickle.UnpicklingError("an array that is not described as NumPy does")
    return values
