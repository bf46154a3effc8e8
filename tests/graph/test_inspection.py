"""What inspect says: sites with their activation, frozen BatchNorms with the reason, how small a network can get."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from topologies import GROUPED, TOPOLOGIES, Chain, Residual, conv, pooled, randomise_
from torch import Tensor, nn

import softprune as sp
from softprune.cut import apply_plan, floor_masks, make_plan, required_sites
from softprune.cut.analyses import _live_outputs
from softprune.cut.selection import read_graph
from softprune.graph import trace

IMAGE = torch.randn(2, 3, 8, 8)


@pytest.mark.parametrize("name", [*TOPOLOGIES, *GROUPED])
def test_every_batchnorm_is_a_site_or_frozen_and_the_floor_is_true(name: str) -> None:
    topology = {**TOPOLOGIES, **GROUPED}[name]
    model, example = randomise_(topology.build()), topology.example()
    found = sp.inspect(model, example, site_kinds=topology.kinds)
    norms = [n for n, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    masked = [name for site in found.sites for name in site.members]
    assert sorted(masked + [f.name for f in found.frozen]) == sorted(norms)
    assert all(frozen.reason for frozen in found.frozen)
    graph = trace(model, example).with_kinds(topology.kinds)
    compact = apply_plan(make_plan(graph, model, floor_masks(graph)), model)
    counted = sp.cost(compact, example)
    assert (counted.macs, counted.params) == (found.floor_macs, found.floor_params)
    assert found.floor_macs < found.macs
    assert found.floor_params < found.params


def test_it_prints_as_a_table() -> None:
    text = str(sp.inspect(Residual(), IMAGE, exclude="bn1", site_kinds="sum"))
    assert re.search(r"^bn +8 +site, relu, keeps at least 1 channel \(only path to the output\)$", text, re.M)
    assert re.search(r"^bn2 +8 +frozen: add reads it without an activation in between$", text, re.M)
    assert re.search(r"^bn1 +6 +frozen: you excluded it$", text, re.M)
    assert "1 sites with 8 channels, 2 frozen" in text


def test_sites_that_carry_every_path_are_required() -> None:
    required = {
        "chain": {"bn1", "bn2"},
        "residual": {"bn"},
        "pre-activation": {"bn"},
        "dense": {"bn"},
        "squeeze-excite": {"bn1", "bn2"},
        "option-A": {"bn"},  # zero channels are no path
        "layer scale": {"bn1", "bn2"},  # nor is a parameter
        "two inputs": {"bn", "bn2"},  # of two branches one stays
        "two outputs": {"bn1", "bn2"},
        "inverted residual": {"bn", "bn4"},
        "u-net": {"bn1", "bn3"},
        "shared": {"bn", "bn1", "bn2"},
    }
    for name, expected in required.items():
        topology = TOPOLOGIES[name]
        assert required_sites(trace(topology.build(), topology.example())) == expected, name


class Walled(nn.Module):
    """What is behind an operator without a rule still depends on what is before it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(3, 8), nn.BatchNorm2d(8)
        self.middle = conv(8, 8)
        self.norm = nn.GroupNorm(2, 8)
        self.shift = nn.Parameter(torch.zeros(8, 1, 1))
        self.conv2, self.bn2 = conv(8, 6), nn.BatchNorm2d(6)
        self.fc = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.middle(F.relu(self.bn1(self.conv1(x))))) + self.shift
        return self.fc(pooled(F.relu(self.bn2(self.conv2(x)))))


def test_operators_without_a_rule_are_named_and_seen_through() -> None:
    found = sp.inspect(Walled(), IMAGE)
    assert found.unknown_operators == {"aten.group_norm.default": "'norm'"}
    assert "operator without a rule: aten.group_norm.default in 'norm'" in str(found)
    assert "add_operator" not in str(found)
    assert {site.name for site in found.sites} == {"bn1", "bn2"}
    assert found.required == {"bn1", "bn2"}


class Lengths(nn.Module):
    """Sequences of given lengths: operators without a rule make the mask, and a constant, and freeze no site."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv1d(3, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = F.relu(self.bn(self.conv(x)))
        padding = ~(torch.arange(x.shape[2]) < lengths[:, None])
        return self.fc(x.masked_fill(padding[:, None], 0.0).mean(2)) + torch.linspace(0, 1, 5)


def test_operators_that_freeze_nothing_are_not_listed() -> None:
    found = sp.inspect(Lengths(), (torch.randn(2, 3, 6), torch.tensor([6, 4])))
    assert found.unknown_operators == {}
    assert [site.name for site in found.sites] == ["bn"]


class AuxiliaryHead(nn.Module):
    """A head that only training runs, as in GoogLeNet."""

    def __init__(self, exportable: bool = True) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(3, 8), nn.BatchNorm2d(8)
        self.side, self.side_bn = conv(8, 4), nn.BatchNorm2d(4)
        self.side_fc = nn.Linear(4, 5)
        self.conv2, self.bn2 = conv(8, 6), nn.BatchNorm2d(6)
        self.fc = nn.Linear(6, 5)
        self.exportable = exportable

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = F.relu(self.bn1(self.conv1(x)))
        logits = self.fc(pooled(F.relu(self.bn2(self.conv2(x)))))
        if not self.training:
            return logits
        if not self.exportable and x.detach().mean().item() > 1e9:  # a branch on data, which torch.export refuses
            return logits
        return logits, self.side_fc(pooled(F.relu(self.side_bn(self.side(x)))))


def test_a_head_that_only_training_runs_is_cut_as_well() -> None:
    model = randomise_(AuxiliaryHead())
    graph = read_graph(model, IMAGE)
    assert not graph.unreached
    assert {site.name for site in graph.sites} == {"bn1", "bn2", "side_bn"}
    masks = {"bn1": torch.arange(8) < 3, "bn2": torch.arange(6) < 2, "side_bn": torch.arange(4) < 2}
    plan = make_plan(graph, model, masks)
    compact = apply_plan(plan, model)
    assert compact.side.weight.shape[:2] == (2, 3)
    assert plan.macs == sp.cost(compact, IMAGE).macs  # what evaluation runs
    logits, side = compact.train()(IMAGE)
    assert logits.shape == side.shape == (2, 5)


def test_a_head_that_cannot_be_read_keeps_what_it_needs() -> None:
    model = randomise_(AuxiliaryHead(exportable=False))
    graph = read_graph(model, IMAGE)
    assert [site.name for site in graph.sites] == ["bn2"]
    assert "trial" in next(frozen.reason for frozen in graph.frozen if frozen.name == "bn1")
    masks = {site.name: torch.arange(site.width) < 2 for site in graph.sites}
    compact = apply_plan(make_plan(graph, model, masks), model)
    logits, side = compact.train()(IMAGE)
    assert logits.shape == side.shape == (2, 5)


class FixedBatch(Chain):
    """A literal batch size: the analysis takes the example as it is."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(2, 3, 8, 8))


class Keywords(Chain):
    def forward(self, images: Tensor, *, scale: float, flags: dict[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
        return {"logits": super().forward(images * scale) + flags["bias"]}


class Tokens(nn.Module):
    """Integer inputs, which stay what they are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.conv1, self.bn1 = nn.Conv1d(6, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.fc = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.fc(F.relu(self.bn1(self.conv1(self.embed(ids).transpose(1, 2)))).amax(2))


@pytest.mark.parametrize(
    ("build", "example"),
    [
        (FixedBatch, IMAGE),
        (Keywords, ((IMAGE,), {"scale": 0.5, "flags": {"bias": torch.randn(2, 5)}})),
        (Tokens, torch.randint(7, (2, 5))),
    ],
)
def test_examples_of_every_kind(build: Callable[[], nn.Module], example: Any) -> None:
    model: Any = randomise_(build())
    with torch.no_grad():
        model.bn1.bias[:4] = -9
    pruner = sp.SoftPruner(model, example)
    assert pruner.plan().dense_macs == sp.cost(model, example).macs
    assert pruner.compact().conv1.out_channels == int(pruner.masks()["bn1"].sum()) < 8


def test_a_model_without_data_is_analysed_by_its_shapes() -> None:
    with torch.device("meta"):
        model = Residual()
    found = sp.inspect(model, torch.empty(2, 3, 8, 8, device="meta"))
    assert {site.name for site in found.sites} == {"bn", "bn1"}


class _Branches(nn.Module):
    """Paths side by side, none of whose sites is on all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a1, self.a2, self.b1 = (
            nn.Sequential(nn.Conv2d(i, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()) for i in (3, 8, 3)
        )
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.a2(self.a1(x)), self.b1(x)], 1).mean((2, 3)))


def test_one_of_several_branches_stays() -> None:
    found = sp.inspect(_Branches(), torch.randn(2, 3, 8, 8))
    assert found.required == {"b1.1"}
    assert found.floor_macs > 0


def test_a_network_never_becomes_a_constant() -> None:
    torch.manual_seed(0)
    model = _Branches()
    pruner = sp.SoftPruner(model, torch.randn(2, 3, 8, 8))
    with torch.no_grad():
        for site in pruner.sites:
            model.get_submodule(site.name).bias.fill_(-9.0)  # all of them are silent
        model.get_submodule("b1.1").bias[3] = -2.0  # this one the least
    compact = pruner.compact().eval()
    kept = {site.name: int(mask.sum()) for site, mask in zip(pruner.sites, pruner.masks().values(), strict=True)}
    assert kept == {"a1.1": 0, "a2.1": 0, "b1.1": 1}
    assert isinstance(compact.head, nn.Linear)
    assert compact.head.in_features == 1


class _CostVolume(Chain):
    """Features that are written into slices of a tensor of zeros, as a stereo network compares shifted images."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        volume = torch.zeros_like(x)
        volume[:, :, 1:] = x[:, :, :-1]
        return self.fc(pooled(F.relu(self.bn2(self.conv2(volume)))))


def test_a_path_through_a_tensor_that_is_written_into_stays() -> None:
    found = sp.inspect(_CostVolume(), torch.randn(2, 3, 8, 8))
    assert "bn2" in found.required
    assert found.floor_macs > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_sites_on_every_path_are_required_and_the_required_sites_are_enough(name: str) -> None:
    graph = trace(TOPOLOGIES[name].build(), TOPOLOGIES[name].example())
    sites = frozenset(site.name for site in graph.sites)
    wanted, required = _live_outputs(graph, sites), required_sites(graph)
    assert {site for site in sites if _live_outputs(graph, sites - {site}) != wanted} <= required
    assert _live_outputs(graph, required) == wanted
    assert all(_live_outputs(graph, required - {site}) != wanted for site in required)


def test_it_names_the_kind_of_every_site_and_who_shares_a_mask() -> None:
    found = sp.inspect(GROUPED["sum of branches"].build(), IMAGE)
    assert [site.kind for site in found.sites] == ["activated", "sum"]
    assert "shares the mask of 'bn3'" in str(found)


@pytest.mark.parametrize(
    ("sliced", "width"), [(lambda x: x[:, : x.shape[1] // 4], 2), (lambda x: x[:, x.shape[1] // 4 :], 6)]
)
def test_slices_at_a_share_of_the_width_freeze_their_channels_alone(
    sliced: Callable[[Tensor], Tensor], width: int
) -> None:
    class Sliced(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.conv2 = conv(width, 6)

        def forward(self, x: Tensor) -> Tensor:
            x = sliced(F.relu(self.bn1(self.conv1(x))))
            return self.fc(pooled(F.relu(self.bn2(self.conv2(x)))))

    found = sp.inspect(Sliced(), IMAGE)
    assert [site.name for site in found.sites] == ["bn2"]
    assert "slices channels" in found.frozen[0].reason


def test_it_says_which_kinds_would_mask_what_is_frozen() -> None:
    found = sp.inspect(Residual(), IMAGE, site_kinds="sum")
    assert found.available == {"stream": 1}
    assert 'site_kinds: "stream" masks 1 of the frozen' in str(found)
    whole = sp.inspect(Residual(), IMAGE)
    assert not whole.frozen
    assert not whole.available


class BatchNormWithin(nn.Module):
    """Named as speechbrain's: a module around a BatchNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def test_a_module_around_a_batchnorm_is_not_a_batchnorm() -> None:
    found = sp.inspect(nn.Sequential(conv(3, 4), BatchNormWithin(4), nn.ReLU(), conv(4, 2)), IMAGE)
    assert [site.name for site in found.sites] == ["1.norm"]
    assert not found.frozen


def test_a_network_without_batchnorm_gets_a_plain_answer() -> None:
    text = str(sp.inspect(nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4), nn.ReLU()), IMAGE))
    assert text.startswith("This network has no BatchNorm")
