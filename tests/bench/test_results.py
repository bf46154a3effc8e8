"""Timing in turns, and what is advised where a compact network is slower."""

import itertools
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from softprune.bench import BenchReport, BenchRow, Timing, alternate
from softprune.bench.results import advice, paired_ratio
from softprune.graph.modules import Select

ROW = BenchRow(
    backend="eager",
    device="cpu",
    dtype="float32",
    batch=1,
    threads=1,
    channels_last=False,
    compile_mode="",
    fold_bn=False,
    dense=None,
    compact=None,
    speed_up=0.8,
    speed_up_spread=(0.8, 0.8),
    mac_ratio=2.0,
)
EVEN = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 8, 1), nn.Conv2d(9, 9, 3, groups=9))


def test_nothing_where_nothing_is_slower() -> None:
    odd = nn.Conv2d(7, 13, 3)
    assert advice([replace(ROW, speed_up=0.98), replace(ROW, speed_up=None)], odd) == ()


@pytest.mark.parametrize(
    ("model", "row", "words"),
    [
        (nn.Sequential(EVEN, nn.Conv2d(8, 13, 3)), {}, ["1 of 3 convolutions", "--round-to 8"]),
        (nn.Sequential(EVEN, Select(torch.tensor([0, 2]), 4)), {}, ["1 layers read", "--no-gathers"]),
        (EVEN, {"device": "cuda"}, ["reduce-overhead"]),
        (EVEN, {"device": "cuda", "compile_mode": "default"}, ["reduce-overhead"]),
    ],
)
def test_each_cause_is_named(model: nn.Module, row: dict[str, str], words: list[str]) -> None:
    (sentence,) = advice([ROW if not row else replace(ROW, **row)], model)  # type: ignore[arg-type]
    assert all(word in sentence for word in words)
    assert sentence in str(BenchReport((), 2, 1, (sentence,)))


def test_no_advice_without_a_cause() -> None:
    assert advice([ROW, replace(ROW, device="cuda", compile_mode="reduce-overhead")], EVEN) == ()


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
