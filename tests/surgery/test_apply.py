"""Weights of grouped convolutions shrink group by group, in time that grows with the channels and no faster."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from softprune.plan import ModuleCut
from softprune.surgery.apply import slice_tensor


def by_hand(weight: Tensor, cut: ModuleCut, groups: int) -> Tensor:
    """The dense matrix of the grouped weight, cut, and its blocks."""
    transposed = cut.kind == "conv_transpose"
    rows, columns = (cut.inputs, cut.outputs) if transposed else (cut.outputs, cut.inputs)
    row_size, column_size = weight.shape[0] // groups, weight.shape[1]
    kept = [
        [weight[row, column % column_size] for column in columns if column // column_size == row // row_size]
        for row in rows
    ]
    return torch.stack([torch.stack(row) for row in kept])


CUTS = {
    "grouped": ModuleCut(kind="conv", width_in=12, width_out=8, inputs=(0, 2, 7, 8), outputs=(0, 5), groups=2),
    "transposed": ModuleCut(
        kind="conv_transpose", width_in=8, width_out=12, inputs=(1, 2, 6, 7), outputs=(0, 4, 9, 11), groups=2
    ),
    "depthwise": ModuleCut(kind="conv", width_in=6, width_out=6, inputs=(1, 2, 5), outputs=(1, 2, 5), groups=3),
    "depthwise multiplier": ModuleCut(
        kind="conv", width_in=4, width_out=8, inputs=(0, 3), outputs=(0, 1, 6, 7), groups=2
    ),
    "depthwise transposed": ModuleCut(
        kind="conv_transpose", width_in=6, width_out=6, inputs=(0, 4), outputs=(0, 4), groups=2
    ),
}
DENSE_GROUPS = {"grouped": 2, "transposed": 2, "depthwise": 6, "depthwise multiplier": 4, "depthwise transposed": 6}


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", CUTS)
def test_kept_blocks_are_those_of_the_dense_weight(name: str, memory_format: torch.memory_format) -> None:
    cut, groups = CUTS[name], DENSE_GROUPS[name]
    rows, columns = cut.width_out, cut.width_in
    if cut.kind == "conv_transpose":
        rows, columns = columns, rows
    weight = torch.randn(rows, columns // groups, 3, 3).to(memory_format=memory_format)
    got = slice_tensor(cut, "weight", weight)
    assert torch.equal(got, by_hand(weight, cut, groups))
    assert got.is_contiguous(memory_format=memory_format)


def test_a_wide_depthwise_weight_takes_no_longer_than_a_selection() -> None:
    width = 4096
    kept = tuple(range(0, width, 2))
    cut = ModuleCut(kind="conv", width_in=width, width_out=width, inputs=kept, outputs=kept, groups=len(kept))
    weight = torch.randn(width, 1, 3, 3)
    begun = time.perf_counter()
    slice_tensor(cut, "weight", weight)
    assert time.perf_counter() - begun < 0.25  # group by group it took most of a second
