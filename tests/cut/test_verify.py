"""What a verification compares, what its certificate says, and which module an error names."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import softprune as sp
from softprune.cut import PrunePlan, apply_plan, make_plan, verify_plan
from softprune.cut.verify import masks_on
from softprune.errors import ModelError, PlanError, VerificationError
from softprune.graph import trace

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


@pytest.mark.parametrize(
    ("kept", "wrong"), [(2, "conv"), (2, "bn"), (2, "inner"), (2, "branch"), (2, "fc"), (0, "bn"), (0, "fc")]
)
def test_the_first_module_that_differs_is_named(kept: int, wrong: str) -> None:
    torch.manual_seed(0)
    model = Net().double()  # constants are rounded where they fold into a float32 bias
    plan, masks = cut(model, kept)
    compact = apply_plan(plan, model)
    with masks_on(model, masks):
        assert sp.verify(model, compact, IMAGES).max_difference < 1e-12
        with torch.no_grad():
            compact.get_submodule(wrong).bias += 1.0
        with pytest.raises(VerificationError, match=f"on input 2x3x8x8, first seen at '{wrong}'"):
            sp.verify(model, compact, IMAGES)
        assert not model.get_submodule(wrong)._forward_hooks


def test_only_modules_of_the_width_before_the_cut_are_compared() -> None:
    model = Net()
    compact = apply_plan(cut(model, 2)[0], model)
    for other in (Net(2), Net(8)):
        with pytest.raises(VerificationError, match="first seen at 'fc'"):
            sp.verify(other, compact, IMAGES)


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
    with pytest.raises(VerificationError, match=r"masked one to 1e-05 .* 'the model's own forward'"):
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


def test_a_plan_must_fit_the_network_that_is_verified() -> None:
    plan, masks = cut(Net(), 2)
    other = Net()
    other.fc = nn.Linear(4, 6)
    with pytest.raises(PlanError, match=r"whose 'fc\.bias' is \(5,\)\. Got \(6,\)"):
        verify_plan(plan, other, masks, IMAGES)


def test_networks_are_given_as_modules() -> None:
    for networks in ((Net, Net()), (Net(), Net)):
        with pytest.raises(ModelError, match=r"must be a torch\.nn\.Module\. Got the class Net"):
            sp.verify(*networks, IMAGES)  # type: ignore[arg-type]


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
    with pytest.raises(VerificationError, match="finite outputs"):
        verify_plan(plan, broken, masks, IMAGES)
