"""Timing in turns, and what is advised where a compact network is slower."""

import itertools
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from softprune.bench import BenchReport, BenchRow, Timing, alternate
from softprune.bench.latency import advice, paired_ratio
from softprune.costs import Cost
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
EVEN = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 8, 1), nn.Conv2d(16, 16, 3, groups=16))
DEPTHWISE = nn.Conv2d(9, 9, 3, groups=9)
DENSE = Cost(macs=100, activations=100, params=1, channels=1, by_module={})
HALF = replace(DENSE, macs=50, activations=50)
GPU = replace(ROW, device="cuda", compile_mode="reduce-overhead")


@pytest.mark.parametrize(
    ("model", "rows", "compact", "causes"),
    [
        (EVEN, [ROW], HALF, []),
        (nn.Conv2d(7, 13, 3), [replace(GPU, speed_up=1.1), replace(GPU, speed_up=None)], DENSE, []),
        (nn.Sequential(EVEN, nn.Conv2d(8, 13, 3), DEPTHWISE), [GPU], HALF, ["Widths: 1 convolutions"]),
        (nn.Sequential(EVEN, nn.Conv2d(8, 13, 3), DEPTHWISE), [ROW], HALF, ["Depthwise widths: 1 depthwise"]),
        (nn.Sequential(EVEN, Select(torch.tensor([0, 2]), 4)), [ROW], HALF, ["Gathers: 1 layers"]),
        (EVEN, [ROW], replace(HALF, activations=85), ["Memory traffic: 50% of the MACs are left, but 85%"]),
        (EVEN, [GPU, replace(GPU, batch=64, speed_up=1.5)], HALF, ["Batch: it is faster at 64 images"]),
        (EVEN, [replace(ROW, device="cuda")], HALF, ["Launches"]),
        (EVEN, [replace(GPU, compile_mode="default")], HALF, ["Launches"]),
        (EVEN, [replace(GPU, backend="graph", compile_mode="")], HALF, []),
    ],
)
def test_each_cause_is_named(model: nn.Module, rows: list[BenchRow], compact: Cost, causes: list[str]) -> None:
    found = advice(rows, model, (DENSE, compact))
    assert len(found) == len(causes)
    for sentence, cause in zip(found, causes, strict=True):
        assert sentence.startswith(cause)
        assert sentence in str(BenchReport((), 2, 1, found))


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
