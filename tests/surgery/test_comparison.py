"""Settings for one quick pass leave the process as they found it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from softprune.surgery.comparison import one_thread


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_one_within_another_restores_the_number_of_threads() -> None:
    with one_thread():
        with one_thread():
            pass
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("first_out", ["first in", "last in"])
@pytest.mark.usefixtures("three_threads")
def test_two_that_overlap_restore_the_number_of_threads(first_out: str) -> None:
    """Here, in the other thread, and in threads that start later: each has a number of its own."""
    entered, leave = threading.Event(), threading.Event()
    seen: list[int] = []

    def second() -> None:
        with one_thread():
            entered.set()
            assert leave.wait(10)
            seen.append(torch.get_num_threads())
        seen.append(torch.get_num_threads())

    worker = threading.Thread(target=second)
    with one_thread():
        worker.start()
        assert entered.wait(10)
        if first_out == "last in":
            leave.set()
            worker.join()
        assert torch.get_num_threads() == 1
    leave.set()
    worker.join()
    assert seen == [1, 3]
    assert torch.get_num_threads() == 3
    later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert seen[-1] == 3
