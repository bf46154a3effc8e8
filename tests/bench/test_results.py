"""What is advised where a compact network is slower."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from softprune.bench import BenchReport, BenchRow
from softprune.bench.results import advice
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
