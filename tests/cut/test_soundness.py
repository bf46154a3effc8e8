"""Networks that an analysis alone would get wrong: each is refused before training, frozen with a reason, or right."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from topologies import randomise_
from torch import Tensor, nn
from torch.nn.utils import prune

import softprune as sp
from softprune.cut import PrunePlan, cut_and_verify, make_plan
from softprune.cut.selection import read_graph
from softprune.cut.verify import verify
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


@pytest.mark.parametrize("build", [ScaledByWidth, SlicedByWidth, LayerScaled])
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
    assert cut_and_verify(plan, model, masks, IMAGES)[1].max_difference < 1e-12
    others = {name: ~mask for name, mask in masks.items()}
    with pytest.raises(VerificationError, match="must equal the masked one"):
        cut_and_verify(plan, model, others, IMAGES)


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
    assert "does not call the module" in reasons(FunctionalNorm(zero))["bn1"]


# --- sizes of the inputs -------------------------------------------------------------------------------------------


def unit(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


class InTraining(nn.Module):
    """Training follows the features with a buffer, or hands an inner layer out."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second, self.head = unit(3, 8), unit(8, 8), nn.Linear(8, 3)
        self.register_buffer("centre", torch.zeros(8))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        inner = self.first(x)
        features = self.second(inner).mean((2, 3))
        y = self.head(F.dropout(features, training=self.training))
        if not self.training:
            return y
        if self.kind == "centre":
            with torch.no_grad():
                self.centre.lerp_(features.mean(0), 0.1)
            return y
        return y, inner.view(len(x), 2, 4, -1) if self.kind == "literal" else inner


@pytest.mark.parametrize(
    ("kind", "bound", "free"),
    [("centre", "second.1", "first.1"), ("inner", "first.1", "second.1"), ("literal", "first.1", "second.1")],
)
def test_what_training_alone_runs_still_runs(kind: str, bound: str, free: str) -> None:
    model = randomise_(InTraining(kind))
    before = copy.deepcopy(model.state_dict())
    random_state = torch.get_rng_state()
    assert bound in reasons(model)
    plan, compact = cut_in_half(model, IMAGES)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.equal(model.centre, before["centre"])
    assert list(plan.sites) == [free]
    assert compact.get_submodule(free).num_features == 4
    outputs, expected = (network.train()(IMAGES) for network in (compact, model))
    if kind != "centre":
        assert outputs[1].shape == expected[1].shape


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = unit(3, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.sub_(0.5).div_(0.25)).mean((2, 3)))


def test_a_network_that_writes_into_its_input() -> None:
    image = IMAGES.clone()
    _, compact = cut_in_half(randomise_(InPlace()), IMAGES)
    assert compact.body[1].num_features == 4
    assert torch.equal(IMAGES, image)


class TwoHolders(Plain):
    """Two modules without a weight hold one buffer, which has no channels."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()
        self.register_buffer("level", torch.tensor([0.5]))
        self.act.register_buffer("level", self.level)

    def first(self, x: Tensor) -> Tensor:
        return super().first(x) * self.act.level


def test_a_buffer_of_two_modules_keeps_its_dtype() -> None:
    _, compact = cut_in_half(TwoHolders(), IMAGES)
    assert compact.act.level.dtype == torch.float32


class Mixed(nn.Module):
    """A product that no layer makes; the BatchNorm behind it reads a part of what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.bn, self.last = unit(3, 8), nn.BatchNorm2d(8), unit(8, 8)
        self.weight, self.head = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.tensordot(self.weight, self.body(x), ([1], [1])).transpose(0, 1)
        return self.head(self.last(F.relu(self.bn(mixed))).mean((2, 3)))


def test_a_cut_behind_an_operator_without_a_rule_can_be_cut_again() -> None:
    _, compact = cut_in_half(randomise_(Mixed()), IMAGES)
    assert compact.bn.num_features == 4
    graph = read_graph(compact, IMAGES)
    assert not any("misreads" in frozen.reason for frozen in graph.frozen)
    assert "last.1" in [site.name for site in graph.sites]
    _, smaller = cut_in_half(compact, IMAGES)
    torch.testing.assert_close(smaller.eval()(IMAGES), compact.eval()(IMAGES), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "begin",
    [
        pytest.param(lambda x: x.reshape(4, 3, 8, 8), id="a literal in a view"),
        pytest.param(lambda x: x + torch.zeros(4, 1, 1, 1).to(x), id="a constant of that size"),
    ],
)
def test_a_network_of_one_batch_size_is_proved_at_that_size(begin) -> None:
    network = type("Fixed", (Plain,), {"forward": lambda self, x: self.last(self.first(begin(x)))})()
    plan, compact = cut_in_half(randomise_(network), images := torch.randn(4, 3, 8, 8))
    assert compact.conv1.out_channels == 4
    assert cut_and_verify(plan, network, plan.masks(), images)[1].inputs[0] == "4x3x8x8"


def test_a_network_that_cannot_be_copied_is_said() -> None:
    network = Plain()
    network.lock = threading.Lock()
    with pytest.raises(ModelError, match=r"copy\.deepcopy must support it"):
        verify(network, Plain(), torch.randn(2, 3, 8, 8))


def _with_feature(network: Plain) -> None:
    network.conv1.register_forward_hook(lambda module, _, output: setattr(module, "features", {"last": [output]}))


def _with_old_weight_norm(network: Plain) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.nn.utils.weight_norm(network.conv1)


def _with_pruned_weights(network: Plain) -> None:
    prune.l1_unstructured(network.conv1, "weight", 0.5)


@pytest.mark.parametrize("leave", [_with_feature, _with_old_weight_norm, _with_pruned_weights])
def test_what_forward_left_on_a_module_is_copied_without_its_graph(leave: Callable[[Plain], None]) -> None:
    network, images = Plain(), torch.randn(2, 3, 8, 8)
    leave(network)
    network(images)
    _, compact = cut_in_half(randomise_(network.train()), images)
    assert torch.allclose(compact.eval()(images), network.eval()(images), atol=1e-6)
