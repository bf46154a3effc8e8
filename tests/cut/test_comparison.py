"""Inputs and outputs that are compared; settings for one quick pass, which leave the process as they found it."""

from __future__ import annotations

import math
from collections import UserDict
from typing import Any

import pytest
import torch

from softprune.cut.comparison import by_sample, compare, noise, outputs_of, quick_outputs_of, random_inputs
from softprune.graph import Example


@pytest.mark.parametrize(
    ("inputs", "outputs", "groups", "options"),
    [
        (16, 16, 16, {"padding": 1}),
        (16, 32, 16, {"stride": 2, "padding": (2, 1), "dilation": (1, 2)}),
        (32, 16, 8, {"bias": False}),
    ],
)
def test_all_groups_at_once_are_the_convolution(inputs: int, outputs: int, groups: int, options: dict) -> None:
    torch.manual_seed(0)
    model = torch.nn.Conv2d(inputs, outputs, (3, 5), groups=groups, **options).double()
    example = Example.of(torch.randn(2, inputs, 7, 9).double())
    with torch.profiler.profile(acc_events=True) as profile:
        (quick,) = quick_outputs_of(model, example)
    assert "aten::im2col" in {event.key for event in profile.key_averages()}
    torch.testing.assert_close(quick, outputs_of(model, example)[0], rtol=0, atol=1e-12)


def test_the_difference_is_that_of_the_output_that_differs_most_relative_to_its_scale() -> None:
    large, small = torch.tensor([100.0, -50.0]), torch.tensor([0.1])
    assert compare([large, small], [large, small]) == (0.0, pytest.approx(100.0))
    assert compare([large, small], [large + 1, small + 0.05]) == pytest.approx((0.05, 0.1))
    assert compare([], []) == compare([torch.ones(0)], [torch.ones(0)]) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("expected", "got"),
    [
        ([[1.0]], []),
        ([[1.0]], [[1.0, 1.0]]),
        ([[1.0, math.nan]], [[math.nan, 1.0]]),
        ([[1.0, math.nan]], [[1.0, 1.0]]),
        ([[1.0, 1.0]], [[1.0, math.nan]]),
        ([[1.0, 1.0]], [[1.0, math.inf]]),
        ([[1.0, math.inf]], [[1.0, -math.inf]]),
        ([[1.0, math.inf]], [[1.0, math.nan]]),
    ],
)
def test_another_shape_or_number_and_other_infinities_differ_by_infinity(expected: Any, got: Any) -> None:
    assert compare([torch.tensor(each) for each in expected], [torch.tensor(each) for each in got])[0] == math.inf


def test_samples_are_compared_one_by_one() -> None:
    example = Example.of(torch.ones(2, 3))
    pieces = by_sample([torch.ones(2, 4), torch.ones(2), torch.ones(5, 4)], example)
    assert [tuple(piece.shape) for piece in pieces] == [(4,), (4,), (2,), (5, 4)]


def test_random_inputs_have_another_batch_size_and_at_last_that_of_the_example() -> None:
    for batch in (1, 2, 4):
        found = [each.args[0].shape[0] for each in random_inputs(Example.of(torch.ones(batch, 3, 32, 32)), 0)]
        assert batch not in found[:-1]
        assert found[-1] == batch


def test_samples_of_noise_have_several_scales_and_integers_stay() -> None:
    image, index = noise(Example.of((torch.ones(3, 2, 16, 16), torch.arange(3))), 0).args
    assert [float(sample.std()) for sample in image] == pytest.approx([1.0, 30.0, 0.1], rel=0.2)
    assert torch.equal(index, torch.arange(3))


def test_outputs_are_copies_and_inputs_stay() -> None:
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> Any:
            x.add_(1)
            self.count += 1
            return UserDict(count=self.count, x=x)

    model, example = Counting(), Example.of(torch.zeros(2, 3))
    first, second = outputs_of(model, example), outputs_of(model, example)
    assert [float(first[0]), float(second[0])] == [1.0, 2.0]
    assert torch.equal(example.args[0], torch.zeros(2, 3))
