"""Inputs and outputs that are compared; settings for one quick pass, which leave the process as they found it."""

from __future__ import annotations

import gc
import math
import threading
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from softprune.cut.comparison import (
    by_sample,
    compare,
    larger,
    noise,
    one_thread,
    outputs_of,
    quick_outputs_of,
    random_inputs,
    without_gc,
)
from softprune.graph import Example


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


def test_the_collector_is_as_before() -> None:
    with without_gc(), without_gc():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with without_gc():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


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


@pytest.mark.parametrize(
    ("layer", "space"),
    [
        (torch.nn.Conv2d(16, 16, (3, 5), groups=16, stride=(1, 2), padding=(2, 1), dilation=(1, 2)), (19, 33)),
        (torch.nn.Conv2d(16, 16, 3, groups=16, bias=False), (20, 14)),
        (torch.nn.Conv2d(16, 24, 1), (2, 3)),
        (torch.nn.Conv2d(16, 24, 1, stride=2, bias=False), (2, 3)),
    ],
)
def test_quick_convolutions_are_the_convolution(layer: torch.nn.Conv2d, space: tuple[int, int]) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(16, 16, 1, groups=16), layer).double()
    example = Example.of(torch.randn(3, 16, *space).double())
    torch.testing.assert_close(quick_outputs_of(model, example), outputs_of(model, example), rtol=0, atol=1e-12)


def test_a_convolution_that_does_not_fit_is_refused_as_by_torch() -> None:
    model = torch.nn.Conv2d(16, 16, 3, groups=16)
    with pytest.raises(RuntimeError, match="to have 16 channels"):
        quick_outputs_of(model, Example.of(torch.randn(2, 8, 9, 9)))


def test_large_images_are_not_unfolded(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = torch.nn.Conv2d(16, 16, 3, groups=16).double()
    example = Example.of(torch.randn(2, 16, 9, 9).double())
    monkeypatch.setattr("softprune.cut.comparison.LARGEST_UNFOLDED", 2 * 16 * 9 * 7 * 7 - 1)
    with torch.profiler.profile(acc_events=True) as profile:
        (quick,) = quick_outputs_of(model, example)
    assert "aten::im2col" not in {event.key for event in profile.key_averages()}
    assert torch.equal(quick, outputs_of(model, example)[0])


def test_grouped_convolutions_in_channels_last() -> None:
    torch.manual_seed(0)
    model = torch.nn.Conv2d(32, 32, 3, groups=8).double().to(memory_format=torch.channels_last)
    example = Example.of(torch.randn(2, 32, 9, 9).double().to(memory_format=torch.channels_last))
    torch.testing.assert_close(quick_outputs_of(model, example), outputs_of(model, example), rtol=0, atol=1e-12)


def test_what_torch_refuses_is_refused() -> None:
    model = torch.nn.Conv2d(16, 16, 3, groups=16)
    with pytest.raises(RuntimeError, match="should be the same"):
        quick_outputs_of(model, Example.of(torch.randn(2, 16, 9, 9).double()))
    model.bias = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(RuntimeError, match="bias"):
        quick_outputs_of(model, Example.of(torch.randn(2, 16, 9, 9)))


def test_an_empty_batch_is_convolved() -> None:
    (output,) = quick_outputs_of(torch.nn.Conv2d(16, 16, 3, groups=16), Example.of(torch.randn(0, 16, 9, 9)))
    assert output.shape == (0, 16, 7, 7)


def test_the_difference_is_that_of_the_output_that_differs_most_relative_to_its_scale() -> None:
    large, small = torch.tensor([100.0, -50.0]), torch.tensor([0.1])
    assert compare([large, small], [large, small]) == (0.0, pytest.approx(100.0))
    assert compare([large, small], [large + 1, small + 0.05]) == pytest.approx((0.05, 0.1))
    assert compare([], []) == compare([torch.ones(0)], [torch.ones(0)]) == (0.0, 0.0)


def test_an_output_that_cancels_has_the_rounding_errors_of_the_large_ones() -> None:
    assert compare([torch.tensor([1e6]), torch.tensor([1e-9])], [torch.tensor([1e6]), torch.tensor([2e-9])])[1] >= 10


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


def test_the_same_infinities_are_equal() -> None:
    values = torch.tensor([2.0, math.inf, -math.inf, math.nan])
    assert compare([values], [values.clone()]) == (0.0, 2.0)
    assert compare([values[1:]], [values[1:].clone()]) == (0.0, 0.0)


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


def test_a_tensor_without_dimensions_is_kept() -> None:
    image, temperature = noise(Example.of((torch.ones(3, 2, 16, 16), torch.tensor(2.0))), 0).args
    assert float(image.std()) == pytest.approx(1.0, rel=0.1)
    assert temperature == 2.0


def test_a_volume_is_never_enlarged() -> None:
    assert noise(Example.of(torch.ones(2, 1, 8, 8)), 0, larger).args[0].shape == (2, 1, 16, 16)
    assert noise(Example.of(torch.ones(2, 1, 8, 8, 8)), 0, larger).args[0].shape == (2, 1, 8, 8, 8)


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
