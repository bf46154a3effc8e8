"""What a verification compares, what its certificate says, and which module an error names."""

from __future__ import annotations

import math
from collections import UserDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import softprune as sp
from softprune.cut import PrunePlan, apply_plan, cut_and_verify, make_plan
from softprune.cut.trial import masks_on
from softprune.cut.verify import by_sample, compare, noise, outputs_of, random_inputs
from softprune.errors import ModelError, VerificationError
from softprune.graph import Example, trace

IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A convolution, a residual branch, and a linear layer."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, width, 1), nn.BatchNorm2d(width)
        self.inner, self.norm = nn.Conv2d(width, width, 1), nn.BatchNorm2d(width)
        self.branch = nn.Conv2d(width, width, 1)
        self.fc = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.conv(x)))
        x = x + self.branch(F.relu(self.norm(self.inner(x))))
        return self.fc(x.mean((2, 3)))


def cut(model: Net, kept: int) -> tuple[PrunePlan, dict[str, Tensor]]:
    """A plan that keeps half of the stem, and `kept` channels in the branch."""
    masks = {"bn": torch.arange(4) < 2, "norm": torch.arange(4) < kept}
    return make_plan(trace(model.eval(), IMAGES.to(model.fc.weight)), model, masks), masks


def test_a_network_that_differs_is_refused() -> None:
    torch.manual_seed(0)
    model = Net().double()  # constants are rounded where they fold into a float32 bias
    plan, masks = cut(model, 2)
    compact = apply_plan(plan, model)
    with masks_on(model, masks):
        assert sp.verify(model, compact, IMAGES).max_difference < 1e-12
        with torch.no_grad():
            compact.inner.bias += 1.0
        with pytest.raises(VerificationError, match="on input 2x3x8x8"):
            sp.verify(model, compact, IMAGES)


class Off(nn.Conv2d):
    """Wrong by a share of its output, in batches of `batch` samples."""

    def __init__(self, share: float, batch: int) -> None:
        super().__init__(3, 2, 1)
        self.share, self.batch = share, batch

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.share * (len(x) == self.batch))


@pytest.mark.parametrize("batch", [2, 3])
def test_a_certificate_has_the_largest_difference_of_both_inputs(batch: int) -> None:
    exact, off = Off(0.0, batch), Off(1e-4, batch)
    off.load_state_dict(exact.state_dict())
    found = sp.verify(exact, off, IMAGES, tolerance=1e-3)
    assert found.max_difference / found.scale == pytest.approx(1e-4)
    assert (found.tolerance, found.dtype, len(found.inputs), found.inputs[0]) == (1e-3, "float64", 2, "2x3x8x8")
    with pytest.raises(VerificationError, match="masked one within 1e-05"):
        sp.verify(exact, off, IMAGES, tolerance=1e-5)


class Float32(Off):
    """Runs in its own dtype only, and has a parameter of another one."""

    def __init__(self) -> None:
        super().__init__(0.0, 2)
        self.order = nn.Parameter(torch.arange(2), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dtype != torch.float32:
            raise TypeError("float32 only")
        return super().forward(x)[:, self.order]


@pytest.mark.parametrize(("options", "tolerance"), [({}, 1e-5), ({"tolerance": 1e-3}, 1e-3)])
def test_a_network_for_one_dtype_is_compared_in_it(options: dict[str, float], tolerance: float) -> None:
    network = Float32()
    found = sp.verify(network, network, IMAGES, **options)
    assert (found.tolerance, found.dtype, found.max_difference) == (tolerance, "float32", 0.0)


class OneSize(Off):
    """Takes images of one size only, of which it fails on `refused` in place of the masked network."""

    def __init__(self, refused: int = 0) -> None:
        super().__init__(0.0, 2)
        self.refused = refused

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != 8 or len(x) == self.refused:
            raise ValueError(f"{len(x)} images")
        return super().forward(x)


def test_an_input_of_the_same_size_is_drawn_where_no_other_is_taken() -> None:
    assert sp.verify(OneSize(), OneSize(), torch.zeros(2, 3, 8, 8), tolerance=10).inputs == ("2x3x8x8", "3x3x8x8")


def test_a_compact_network_must_run_where_the_masked_one_does() -> None:
    with pytest.raises(VerificationError, match=r"Got ValueError on input 3x3x8x8: 3 images\."):
        sp.verify(OneSize(), OneSize(refused=3), torch.zeros(2, 3, 8, 8), tolerance=10)


# --- the network that is returned, in its own precision --------------------------------------------------------------


class Folding(nn.Module):
    """Dropped channels become `constant` at the last layer, whose bias cancels their sum."""

    def __init__(self, constant: float) -> None:
        super().__init__()
        self.conv, self.bn, self.second = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.last = nn.Conv2d(8, 4, 1)
        with torch.no_grad():
            self.bn.bias[4:], self.second.bias[4:], self.last.weight[:, 4:] = -9.0, constant, 1.0
            self.last.bias[:] = -4 * constant

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(F.relu(self.bn(self.conv(x)))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("constant", [0.0, 2e3])
def test_the_certificate_holds_the_difference_in_the_own_precision(dtype: torch.dtype, constant: float) -> None:
    torch.manual_seed(0)
    model = Folding(constant).to(dtype)
    pruner = sp.SoftPruner(model, IMAGES)
    compact, found = pruner.compact(), pruner.certificate
    assert found is not None
    assert found.own_difference is not None
    assert found.own_masked is not None
    assert (found.dtype, found.own_dtype) == ("float64", str(dtype).removeprefix("torch."))
    assert found.max_difference <= 1e-10 * found.scale
    assert found.own_difference <= 8 * max(torch.finfo(dtype).eps, found.own_masked)
    assert {p.dtype for p in compact.parameters()} == {dtype}
    assert compact.training
    assert compact.last.bias.requires_grad
    assert not any(p.data_ptr() == q.data_ptr() for p in compact.parameters() for q in model.parameters())


def test_a_bias_beyond_the_range_of_its_precision_is_refused() -> None:
    torch.manual_seed(0)
    model = Folding(0.0).half()
    pruner = sp.SoftPruner(model, IMAGES)
    with torch.no_grad():
        model.second.bias[4:], model.second.bias[0], model.last.weight[:, 0] = 3e4, -6e4, 2.0
    with pytest.raises(VerificationError, match="must be as close to the outputs in float64 as the masked one"):
        pruner.compact()


def test_outputs_without_a_finite_number_prove_nothing() -> None:
    plan, masks = cut(Net(), 2)
    broken = Net()
    broken.bn.running_var.fill_(-1.0)
    with pytest.raises(ModelError, match="finite outputs"):
        cut_and_verify(plan, broken, masks, IMAGES)


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


class Threshold(nn.Module):
    """Gives zero for inputs of ordinary scale, and the largest value beyond it for wide ones."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return (self.bn(x).amax((2, 3)) - 10).relu()


@pytest.mark.parametrize(("example", "varies"), [(torch.randn(2, 3, 8, 8), False), (torch.ones(2, 3, 8, 8), True)])
def test_equal_outputs_for_the_samples_at_hand_are_noticed(example: Tensor, varies: bool) -> None:
    """Where the samples are equal, they tell nothing."""
    network = Threshold()
    assert sp.verify(network, network, example).varies is varies
