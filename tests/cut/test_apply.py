"""Weights of grouped convolutions shrink group by group, in time that grows with the channels and no faster."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from softprune.cut import ModuleCut
from softprune.cut.apply import duplicated, slice_tensor, take


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


@pytest.mark.parametrize("shape", [(), (3,), (9, 6)])
def test_what_a_norm_has_beside_its_channels_stays(shape: tuple[int, ...]) -> None:
    cut = ModuleCut(kind="norm", width_in=6, width_out=6, inputs=(1, 5), outputs=(1, 5))
    history = torch.randn(shape)
    assert torch.equal(slice_tensor(cut, "history", history), history)


@pytest.mark.parametrize("inference", [False, True])
def test_a_range_of_channels_is_a_new_tensor(inference: bool) -> None:
    with torch.inference_mode(inference):
        weight = torch.randn(6, 4)
    for kept in (range(6), range(2, 5), (0, 3)):
        part = take(weight, 0, tuple(kept))
        assert torch.equal(part, weight[list(kept)])
        assert part.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr()


class Tied(nn.Module):
    """Two layers with one weight, which a list holds as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.listed = [self.first.weight, self.first.bias]


def test_a_copy_has_its_own_memory() -> None:
    model = Tied()
    model.first.bias.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    copy = duplicated(model)
    assert copy.listed[0] is copy.first.weight is copy.second.weight
    assert copy.listed[1] is copy.first.bias
    assert not copy.first.bias.requires_grad
    for name, parameter in copy.named_parameters():
        assert torch.equal(parameter, before[name].to(parameter.dtype))
        parameter.data.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
