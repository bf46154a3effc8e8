"""Blocks take turns, and the numbers are what they say."""

import itertools
import time

import pytest

from softprune.bench import Timing, alternate
from softprune.bench.results import paired_ratio


def test_the_slower_call_is_seen_to_be_slower() -> None:
    calls = {"slow": lambda: time.sleep(0.004), "fast": lambda: time.sleep(0.001)}
    timings = alternate(calls, repeats=5, warm_up=1, block_seconds=0.0)
    assert timings["slow"].median >= 4
    assert 1 <= timings["fast"].median < timings["slow"].median
    assert all(len(timing.blocks) == 5 for timing in timings.values())


def test_calls_take_turns_and_every_block_is_waited_for() -> None:
    events: list[str] = []
    calls = {name: (lambda name=name: events.append(name)) for name in ("a", "b")}
    alternate(calls, repeats=3, warm_up=0, finish=lambda: events.append("wait"), block_seconds=0.0)
    assert events[0] == "wait"
    blocks = [name for name in events if name != "wait"][2:]  # the first two choose how many calls make a block
    assert blocks == ["a", "b", "b", "a", "a", "b"]
    assert all(after == "wait" for before, after in itertools.pairwise(events) if before != "wait")


def test_short_calls_are_repeated_within_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def call() -> None:
        clock[0] += 0.0005

    alternate({"a": call}, repeats=2, warm_up=0, block_seconds=0.01)
    assert round(clock[0] / 0.0005) == 1 + 2 * 20


def test_median_and_quartiles() -> None:
    timing = Timing((3.0, 1.0, 2.0, 5.0, 4.0))
    assert timing.median == 3.0
    assert timing.spread == (2.0, 4.0)
    assert str(timing) == "3 ms (2 to 4)"
    assert Timing((2.0,)).spread == (2.0, 2.0)


def test_ratios_are_taken_between_neighbours() -> None:
    # The machine became five times slower half way: both ratios are two all the same.
    slow, fast = Timing((2.0, 2.0, 10.0)), Timing((1.0, 1.0, 5.0))
    assert paired_ratio(slow, fast) == (2.0, 2.0, 2.0)
    with pytest.raises(ValueError):
        paired_ratio(slow, Timing((1.0,)))
