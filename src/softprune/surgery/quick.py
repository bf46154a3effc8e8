"""Settings under which one pass of a network that is run once takes the least time on a CPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Many small operations: with more threads each waits for the slowest, on a busy machine a hundred times longer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def without_onednn() -> Iterator[None]:
    """oneDNN compiles a kernel for every new shape, and a cut network has nothing but new shapes, each used once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own other flags here
        with torch.backends.mkldnn.flags(enabled=False):
            yield
