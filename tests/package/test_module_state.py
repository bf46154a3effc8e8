"""What is read from a module's parameters."""

import pytest
import torch
from torch import nn

from softprune.module_state import non_finite


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_large_values_are_finite_even_if_their_sum_is_not(dtype):
    layer = nn.Linear(4, 4).to(dtype)
    nn.init.constant_(layer.weight, torch.finfo(dtype).max)
    assert non_finite(layer) == []


@pytest.mark.parametrize("values", [[float("nan")], [float("inf")], [float("inf"), float("-inf")]])
def test_parameters_and_statistics_that_are_not_finite_are_named(values):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert non_finite(model) == []
    with torch.no_grad():
        model[0].weight[0, : len(values)] = torch.tensor(values)
        model[1].running_var[: len(values)] = torch.tensor(values)
    assert non_finite(model) == ["0.weight", "1.running_var"]


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fn])
def test_eight_bit_floats_are_read(dtype: torch.dtype) -> None:
    layer = nn.Linear(3, 3)
    layer.weight = nn.Parameter(torch.ones(3, 3).to(dtype), requires_grad=False)
    assert non_finite(layer) == []
    layer.weight = nn.Parameter(torch.full((3, 3), torch.nan).to(dtype), requires_grad=False)
    assert non_finite(layer) == ["weight"]
