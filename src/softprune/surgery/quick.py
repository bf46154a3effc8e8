"""Settings under which one pass of a network that is run once takes the least time on a CPU."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _Nested(threading.local):
    """How often this thread has entered `one_thread`."""

    depth = 0


_nested = _Nested()
_lock = threading.Lock()
_found: list[int] = []
"""The numbers of threads to go back to, one for each thread that is inside `one_thread`."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Many small operations: with more threads each waits for the slowest, on a busy machine a hundred times longer."""
    # The number that one thread sets is its own, and that of threads born later: those must not go back to 1.
    if _nested.depth == 0:
        with _lock:
            found = max(torch.get_num_threads(), *_found, 1)
            _found.append(found)
            torch.set_num_threads(1)
    _nested.depth += 1
    try:
        yield
    finally:
        _nested.depth -= 1
        if _nested.depth == 0:
            with _lock:
                _found.remove(found)
                torch.set_num_threads(found)


@contextmanager
def without_onednn() -> Iterator[None]:
    """oneDNN compiles a kernel for every new shape, and a cut network has nothing but new shapes, each used once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own other flags here
        with torch.backends.mkldnn.flags(enabled=False):
            yield
