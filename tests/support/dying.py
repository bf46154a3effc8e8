"""Let this process die by SIGKILL at a chosen file operation: before it, after it, or with half of a file written."""

import builtins
import io
import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

KINDS = ("open", "write", "fsync", "rename", "link", "unlink", "mkdir")
"""Operations that change files. `open` is opening to write."""
WAYS = ("before", "after", "half")


@dataclass(frozen=True)
class Death:
    """When a process dies: at the ``number``-th operation of a kind, counted from one."""

    kind: str
    number: int
    way: str


class FileOperations:
    """Counts the operations of this process on files below a folder, from when it is installed.

    Args:
        folder: Operations elsewhere are not counted.
        death: When to die; None to live.
    """

    def __init__(self, folder: Path, death: Death | None = None) -> None:
        self._folder, self._death = str(folder.resolve()) + os.sep, death
        self.counts: Counter[str] = Counter()

    def install(self) -> None:
        """Replace the functions of this process that change files, for good."""
        builtins.open = io.open = self._opening(io.open)  # type: ignore[assignment]
        renaming = self._wrapped("rename", os.rename, last=1)
        os.rename = os.replace = renaming
        os.link = self._wrapped("link", os.link, last=1)
        os.unlink = os.remove = self._wrapped("unlink", os.unlink)
        os.mkdir = self._wrapped("mkdir", os.mkdir)
        os.fsync = self._syncing(os.fsync)

    def write_counts(self, path: str) -> None:
        """Write how many operations of each kind there were."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.write(descriptor, json.dumps(self.counts).encode())
        os.close(descriptor)

    def perform(self, kind: str, path: Any, operation: Callable[[], Any], half: Callable[[], Any]) -> Any:
        """Perform an operation, and die at it if it is the chosen one."""
        if isinstance(path, int) or not os.path.abspath(os.fsdecode(path)).startswith(self._folder):
            return operation()
        self.counts[kind] += 1
        death = self._death
        if death is None or death.kind != kind or death.number != self.counts[kind]:
            return operation()
        if death.way == "after":
            operation()
        elif death.way == "half":
            half()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("killed")

    def _wrapped(self, kind: str, function: Callable[..., Any], last: int = 0) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return self.perform(kind, args[last], lambda: function(*args, **kwargs), lambda: function(*args, **kwargs))

        return wrapper

    def _syncing(self, function: Callable[[int], None]) -> Callable[[int], None]:
        def fsync(descriptor: int) -> None:
            def half() -> None:
                # A file is forced to disk before it gets its name: half of it must never be read.
                if os.path.isfile(path):
                    os.truncate(descriptor, os.fstat(descriptor).st_size // 2)

            path = os.readlink(f"/proc/self/fd/{descriptor}")
            self.perform("fsync", path, lambda: function(descriptor), half)

        return fsync

    def _opening(self, function: Callable[..., IO[Any]]) -> Callable[..., IO[Any]]:
        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if isinstance(file, int) or not set(mode) & set("wax+"):
                return function(file, mode, *args, **kwargs)
            stream = self.perform("open", file, lambda: function(file, mode, *args, **kwargs), lambda: None)
            return _Stream(stream, file, self)

        return opened


class _Stream:
    """A file whose writes are operations."""

    def __init__(self, stream: IO[Any], path: Any, operations: FileOperations) -> None:
        self._stream, self._path, self._operations = stream, path, operations

    def write(self, content: Any) -> int:
        def half() -> None:
            self._stream.write(content[: len(content) // 2])
            self._stream.flush()

        return self._operations.perform("write", self._path, lambda: self._stream.write(content), half)

    def __enter__(self) -> "_Stream":
        self._stream.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._stream.__exit__(*error)

    def __iter__(self) -> Any:
        return iter(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
