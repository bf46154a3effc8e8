"""Networks that an analysis alone would get wrong: each is refused before training, frozen with a reason, or right."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import softprune as sp
from softprune.cut import PrunePlan, make_plan, verify_plan
from softprune.cut.selection import read_graph
from softprune.errors import ModelError, VerificationError

IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 5)

    def first(self, x: Tensor) -> Tensor:
        return F.relu(self.bn1(self.conv1(x)))

    def last(self, h: Tensor) -> Tensor:
        return self.fc(F.relu(self.bn2(self.conv2(h))).mean((2, 3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


def reasons(model: nn.Module, example: Tensor = IMAGES) -> dict[str, str]:
    return {frozen.name: frozen.reason for frozen in sp.inspect(model, example).frozen}


def cut_in_half(model: nn.Module, example: Tensor) -> tuple[PrunePlan, nn.Module]:
    pruner = sp.SoftPruner(model, example)
    with torch.no_grad():
        for site in pruner.sites:
            module = model.get_submodule(site.name)
            module.bias[::2], module.weight[::2] = -5.0, 0.01  # type: ignore[index, operator]
    return pruner.plan(), pruner.compact()


# --- copies that share functions with the original -----------------------------------------------------------------


def wrapped_forward() -> nn.Module:
    model = Plain()
    original = model.forward
    model.forward = lambda x: original(x.float())  # type: ignore[method-assign]
    return model


class LambdaBranch(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.side = lambda x: F.relu(self.bn1(self.conv1(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.side(x))


@pytest.mark.parametrize("build", [wrapped_forward, LambdaBranch])
def test_a_copy_must_compute_with_its_own_parameters(build: type[nn.Module]) -> None:
    for call in (sp.inspect, sp.SoftPruner):
        with pytest.raises(ModelError, match=r"own parameters\. A copy of this .* reads 'conv1\.weight'"):
            call(build(), IMAGES)


def test_a_forward_that_is_replaced_after_the_pruner_was_made() -> None:
    model = Plain()
    pruner = sp.SoftPruner(model, IMAGES)
    original = model.forward
    model.forward = lambda x: original(x.float())  # type: ignore[method-assign]
    with pytest.raises((VerificationError, ModelError), match="own parameters"):
        pruner.compact()


# --- widths used as values -----------------------------------------------------------------------------------------


class ScaledByWidth(Plain):
    """A residual branch whose last BatchNorm starts at zero hides what is wrong inside."""

    def __init__(self) -> None:
        super().__init__()
        self.conv3, self.bn3 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        nn.init.zeros_(self.bn2.weight)

    def inside(self, h: Tensor) -> Tensor:
        return h * h.shape[1] ** -0.5

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        h = self.inside(F.relu(self.bn3(self.conv3(x))))
        return self.fc(F.relu(x + self.bn2(self.conv2(h))).mean((2, 3)))


class SlicedByWidth(ScaledByWidth):
    def inside(self, h: Tensor) -> Tensor:
        part = h.shape[1] // 4
        return torch.cat([2 * h[:, :part], h[:, part:]], 1)


class MeanOverWidth(ScaledByWidth):
    def inside(self, h: Tensor) -> Tensor:
        return h + h.sum(1, keepdim=True) / h.shape[1]


class LayerScaled(ScaledByWidth):
    """Zero by a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.ones_(self.bn2.weight)
        self.scale = nn.Parameter(torch.full((8, 1, 1), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        h = self.inside(F.relu(self.bn3(self.conv3(x))))
        return self.fc(F.relu(x + self.scale * self.bn2(self.conv2(h))).mean((2, 3)))


@pytest.mark.parametrize("build", [ScaledByWidth, SlicedByWidth, MeanOverWidth, LayerScaled])
@pytest.mark.parametrize("seed", range(3))
def test_a_width_used_as_a_value_is_found_before_training(build: type[nn.Module], seed: int) -> None:
    torch.manual_seed(seed)
    model = build()
    assert "bn3" in reasons(model)
    plan, _ = cut_in_half(model, IMAGES)  # raises if the cut is not exact
    assert plan.macs < plan.dense_macs


class GatedByScale(Plain):
    """Uses its width only for inputs that are larger than the example."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        large = (x.abs().amax((1, 2, 3), keepdim=True) > 20).to(h.dtype)
        return self.last(h * (1 + large * h.shape[1]))


def test_inputs_of_several_scales_are_compared() -> None:
    assert "bn1" in reasons(GatedByScale())

    class Clamped(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.clamp(-15, 15))

    torch.manual_seed(0)
    plain, clamped = nn.Conv2d(3, 2, 3), Clamped(3, 2, 3)
    clamped.load_state_dict(plain.state_dict())
    with pytest.raises(VerificationError, match="must equal the masked one"):
        sp.verify(plain, clamped, IMAGES)
    sp.verify(plain, plain, IMAGES)

    class Thresholded(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + (x.abs().amax((1, 2, 3), keepdim=True) < 1)

    thresholded = Thresholded(3, 2, 3)
    thresholded.load_state_dict(plain.state_dict())
    for images in (IMAGES[:1], IMAGES):
        with pytest.raises(VerificationError, match="must equal the masked one"):
            sp.verify(plain, thresholded, images)


class Remembering(Plain):
    """Returns what it returned for the first input of a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.remembered: dict[torch.Size, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if x.shape not in self.remembered:
            self.remembered[x.shape] = super().forward(x)
        return self.remembered[x.shape]


class OneBuffer(Plain):
    """Writes every output to the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("result", torch.empty(2, 5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.result.copy_(super().forward(x))


@pytest.mark.parametrize("network", [Remembering, OneBuffer])
def test_remembered_outputs_prove_nothing(network: type[Plain]) -> None:
    torch.manual_seed(0)
    model = network()
    graph = read_graph(OneBuffer() if network is OneBuffer else Plain(), IMAGES)
    masks = {site.name: torch.arange(site.width) < 4 for site in graph.sites}
    plan = make_plan(graph, model, masks)
    assert verify_plan(plan, model, masks, IMAGES).max_difference < 1e-12
    others = {name: ~mask for name, mask in masks.items()}
    with pytest.raises(VerificationError, match="must equal the masked one"):
        verify_plan(plan, model, others, IMAGES)


class BuiltAnew(Plain):
    """Copies of it are built by its class, in float32; its first parameters are no floating ones."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(5, dtype=torch.complex64), requires_grad=False)
        self.order = nn.Parameter(torch.arange(5), requires_grad=False)

    def __deepcopy__(self, memo: dict[int, object]) -> BuiltAnew:
        twin = BuiltAnew()
        twin.load_state_dict(self.state_dict())
        return twin.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, self.order] * self.phase.abs()


@pytest.mark.filterwarnings("ignore:Casting complex values")
def test_a_network_that_copies_itself_is_cut() -> None:
    torch.manual_seed(0)
    model = BuiltAnew()
    _, compact = cut_in_half(model.eval(), IMAGES)
    assert sum(each.numel() for each in compact.parameters()) < sum(each.numel() for each in model.parameters())


# --- functions in place of modules ---------------------------------------------------------------------------------


class FunctionalNorm(Plain):
    def __init__(self, zero: bool) -> None:
        super().__init__()
        if zero:
            nn.init.zeros_(self.bn2.weight)

    def first(self, x: Tensor) -> Tensor:
        bn = self.bn1
        return F.relu(
            F.batch_norm(self.conv1(x), bn.running_mean, bn.running_var, bn.weight, bn.bias, self.training, 0.1, bn.eps)
        )


@pytest.mark.parametrize("zero", [False, True])
def test_a_norm_that_is_applied_by_a_function_is_no_site(zero: bool) -> None:
    assert "never calls the module" in reasons(FunctionalNorm(zero))["bn1"]


class TiedConvolutions(Plain):
    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bn2(self.conv2(self.first(x))))
        return F.conv_transpose2d(h, self.conv1.weight, padding=1)


class HalfConstant(Plain):
    """With the first half of `bn` masked, half of what `conv1` reads is the constant zero."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)
        self.grouped, self.bn0 = nn.Conv2d(8, 8, 1, groups=2), nn.BatchNorm2d(8)
        self.conv1 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        nn.init.constant_(self.bn0.bias, -0.5)
        nn.init.zeros_(self.grouped.bias)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.relu(self.bn0(self.grouped(F.relu(self.bn(self.stem(x)))))))


class HalfConstantDecoder(HalfConstant, TiedConvolutions):
    """A function reads the weight of `conv1`."""


class HalfConstantTied(HalfConstant):
    """A module that is never called has the weight of `conv1`."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Conv2d(8, 8, 3, padding=1)
        self.spare.weight = self.conv1.weight


@pytest.mark.parametrize(("build", "columns"), [(HalfConstant, 4), (HalfConstantDecoder, 8), (HalfConstantTied, 8)])
def test_a_weight_that_others_have_keeps_the_columns_of_dead_inputs(build: type[nn.Module], columns: int) -> None:
    model = build()
    graph = read_graph(model, IMAGES)
    plan = make_plan(graph, model, {"bn": torch.arange(8) >= 4})
    assert len(plan.modules["conv1"].inputs) == columns


class TiedToUncalled(Plain):
    """A second module has the weight of the first layer, and forward() never calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Conv2d(3, 8, 3, padding=1)
        self.spare.weight = self.conv1.weight


def test_a_layer_that_an_uncalled_module_shares_stays_whole() -> None:
    # bn1 is still a site: it gathers from a layer that stays whole.
    plan, small = cut_in_half(TiedToUncalled(), IMAGES)
    assert plan.params == sum(parameter.numel() for parameter in small.parameters())
    assert small.spare.weight is small.conv1.weight


# --- sizes of the inputs -------------------------------------------------------------------------------------------
