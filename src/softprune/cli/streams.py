"""Standard output and error that may go away (a closed pipe, a full disk) without ending what the command does."""

import contextlib
import errno
import io
import os
import sys
from collections.abc import Callable
from typing import Literal, TextIO, cast


class Stream(io.TextIOBase):
    """Writes to ``sys.stdout`` or ``sys.stderr``, whichever it is at the time, and drops what cannot be written.

    Args:
        name: Which of the two.
        on_loss: Called once, with the error, when writing fails for the first time.
    """

    def __init__(self, name: Literal["stdout", "stderr"], on_loss: Callable[[OSError], None]) -> None:
        self._name = name
        self._on_loss = on_loss
        self.lost: OSError | None = None
        """Why nothing is written any more."""

    @property
    def _file(self) -> TextIO | None:
        file = getattr(sys, self._name)  # None where the shell has closed it (`>&-`)
        return cast(TextIO | None, getattr(file, "rich_proxied_file", file))

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the file behind."""
        return getattr(self._file, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Whether a terminal is behind."""
        return self._file is not None and self._file.isatty()

    def fileno(self) -> int:
        """The descriptor of the file behind."""
        if self._file is None:
            raise io.UnsupportedOperation("fileno")
        return self._file.fileno()

    def write(self, text: str) -> int:
        """Write ``text``, with escapes for letters that the encoding lacks."""
        if self._file is not None and self.lost is None:
            try:
                self._file.write(text)
            except UnicodeEncodeError:
                self._file.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))
            except OSError as error:
                self._lose(error)
        return len(text)

    def flush(self) -> None:
        """Hand on what was written."""
        if self._file is not None and self.lost is None:
            try:
                self._file.flush()
            except OSError as error:
                self._lose(error)

    def _lose(self, error: OSError) -> None:
        self.lost = error
        # Python writes what is left in the buffer when it ends, and would fail once more.
        with contextlib.suppress(OSError):
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self.fileno())
            os.close(nothing)
        self._on_loss(error)


def nobody_reads(error: OSError) -> bool:
    """Whether output was lost because its reader has gone, as `head` does when it has seen enough."""
    return error.errno == errno.EPIPE
