"""How a summary prints, the floor of a site, masks that belong to the caller, and several cuts of one decision."""

from typing import Any

import pytest
import torch
from method_networks import Chain
from torch import Tensor, nn

import softprune as sp
from softprune import models
from softprune.errors import ConfigError
from softprune.graph.modules import Select
from softprune.methods import REGISTRY, SiteSummary, SlimmingPruner, Summary

IMAGES = torch.randn(2, 3, 8, 8)


class Residual(nn.Module):
    """A BatchNorm that every path passes through, and one in a branch that may die."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
        self.branch = nn.Sequential(nn.Conv2d(4, 3, 1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 1))
        self.last = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.last(x + self.branch(x))


def test_a_summary_prints_what_is_kept_and_why() -> None:
    sites = (
        SiteSummary("a", width=16, kept=16, floor=1, left=16),
        SiteSummary("stem.1", width=16, kept=1, floor=1, left=1),
        SiteSummary("b", width=16, kept=0, floor=0, left=0),
        SiteSummary("c", width=1, kept=1, floor=1, left=1),
        SiteSummary("d", width=16, kept=8, floor=8, rounded=3, left=2),
    )
    summary = Summary(sites, 26, 65, 1_500, 2_000, 90, 100, filled=("x", "y"))
    assert str(summary) == repr(summary)
    assert str(summary).splitlines() == [
        "site    width  kept",
        "a          16    16",
        "stem.1     16     1  at its floor",
        "b          16     0",
        "c           1     1",
        "d          16     8  at its floor  3 dead, kept by rounding or a floor  2 left in the cut network",
        "channels: 26 of 65 (60.0% cut)",
        "MACs: 1,500 of 2,000 (25.0% cut)",
        "parameters: 90 of 100 (10.0% cut)",
        "kept one channel that a shape needs: x, y",
    ]
    assert str(Summary(sites[:1], 16, 16, 1, 1, 1, 1, filled=())).splitlines() == [
        "site  width  kept",
        "a        16    16",
        "channels: 16 of 16 (0.0% cut)",
        "MACs: 1 of 1 (0.0% cut)",
        "parameters: 1 of 1 (0.0% cut)",
    ]


@pytest.mark.parametrize(("least", "floors"), [(0, (1, 0)), (1, (1, 1)), (3, (3, 3)), (4, (4, 3))])
def test_the_floor_is_the_least_number_or_one_where_every_path_passes(least: int, floors: tuple[int, int]) -> None:
    pruner = sp.SoftPruner(Residual(), IMAGES, min_channels=least)
    assert tuple(pruner.floors.values()) == floors
    assert tuple(site.floor for site in pruner.summary().sites) == floors


@pytest.mark.parametrize(
    ("keep", "floors"),
    [(0.5, (2, 2)), ({"branch.*": 0.34}, (1, 2)), ({"*": 0.9, "branch.*": 0.0}, (4, 0)), ({"stem.1": 0.25}, (1, 0))],
)
def test_a_share_of_channels_may_be_kept_at_every_site_or_at_some(keep: Any, floors: tuple[int, int]) -> None:
    pruner = sp.SoftPruner(Residual(), IMAGES, keep=keep)
    assert tuple(pruner.floors.values()) == floors
    with torch.no_grad():
        for norm in pruner.norms.values():
            norm.bias.fill_(-9.0)
    assert tuple(int(mask.sum()) for mask in pruner.masks().values()) == floors
    assert tuple(pruner.state_dict()["keep"].values()) == tuple(share for share in pruner.keep.values() if share)


@pytest.mark.parametrize("method", ["scp", "l1"])
def test_a_target_is_met_with_the_shares_that_are_kept(method: str) -> None:
    settings = {"total_steps": 4} if method == "scp" else {}
    keep = {"4": (0.5, 0.9), "1": (0.0, 0.2), "7": 0.3}
    pruner = REGISTRY[method](Chain(30, 40, 30), IMAGES, target={"channels": 0.55}, keep=keep, **settings)
    kept = [int(mask.sum()) for mask in pruner.decide().values()]
    assert 0 < kept[0] <= 6
    assert 20 <= kept[1] <= 36
    assert kept[2] >= 9
    assert sum(kept) == 55
    pruner = REGISTRY[method](
        Chain(30, 40, 30), IMAGES, target={"channels": 0.9}, keep={"4": (0, 0.5)}, round_to=8, **settings
    )
    assert int(pruner.decide()["4"].sum()) == 16, "the multiple below the most"


def test_masks_are_copies() -> None:
    pruner = SlimmingPruner(Residual(), IMAGES, ratio=0.0)
    pruner.decide()
    for mask in pruner.masks().values():
        mask.zero_()
    assert all(mask.all() for mask in pruner.masks().values())


def test_a_layer_that_collapses_is_named(caplog):
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 64, 3), torch.nn.BatchNorm2d(64), torch.nn.ReLU(), torch.nn.Conv2d(64, 8, 1)]
    model = torch.nn.Sequential(*layers)
    pruner = sp.SoftPruner(model, torch.zeros(2, 3, 6, 6))
    pruner.compact()
    assert "every path" not in caplog.text
    with torch.no_grad():
        model[1].bias[2:] = -9.0
    pruner.compact()
    assert "'1' keeps 2 of 64 channels and is on every path" in caplog.text
    assert "for every input" not in caplog.text
    with torch.no_grad():
        model[3].weight.zero_()
    pruner.compact()
    assert "the same outputs for every input" in caplog.text


# --- multiples and gathers change the shapes of a cut, never what it computes -----------------------------------------

EXAMPLE = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def pruner() -> sp.SoftPruner:
    torch.manual_seed(0)
    model = models.PreActResNet(2).eval()
    pruner = sp.SoftPruner(model, EXAMPLE)
    with torch.no_grad():
        for number, site in enumerate(pruner.sites):  # a third of all channels is dead, not the same at every site
            bn, dead = model.get_submodule(site.name), slice(number % 3, None, 3)
            bn.bias[dead], bn.weight[dead] = -3.0, 0.1  # type: ignore[index, operator]
    return pruner


def _selects(network: nn.Module) -> int:
    return sum(isinstance(module, Select) for module in network.modules())


def test_all_cuts_compute_the_same(pruner: sp.SoftPruner) -> None:
    with torch.no_grad():
        masked = pruner.model(EXAMPLE)
        macs = {}
        for round_to, gathers in ((None, True), (8, True), (None, False), (8, False)):
            compact = pruner.compact(round_to=round_to, gathers=gathers)
            torch.testing.assert_close(compact(EXAMPLE), masked, rtol=1e-4, atol=1e-5)
            macs[round_to, gathers] = pruner.plan(round_to=round_to, gathers=gathers).macs
            assert sp.cost(compact, EXAMPLE[:1]).macs == macs[round_to, gathers]
            assert (_selects(compact) > 0) == gathers
            if round_to is not None:
                convs = [module for module in compact.modules() if isinstance(module, nn.Conv2d)]
                assert all(conv.out_channels % 8 == 0 for conv in convs)
                assert all(conv.in_channels % 8 == 0 for conv in convs[1:])
    for bad in ({"round_to": True}, {"round_to": 0}):
        with pytest.raises(ConfigError, match=r"must be an integer|must be True or False"):
            pruner.compact(**bad)  # type: ignore[arg-type]
    assert macs[None, True] < macs[8, True] <= macs[8, False]
    assert macs[None, True] < macs[None, False] <= macs[8, False]


def test_a_target_is_met_by_the_cut_that_it_was_counted_with() -> None:
    pruner = sp.SoftPruner(models.PreActResNet(2), EXAMPLE, target={"macs": 0.5}, total_steps=10)
    for options in ({"gathers": False}, {"round_to": 3}):
        with pytest.raises(ConfigError, match="a target is only met by the cut"):
            pruner.compact(**options)  # type: ignore[arg-type]
    assert pruner.budget is not None
    assert not pruner.budget.is_final  # nothing was decided by a refused call
    limit = 0.5 * sp.cost(models.PreActResNet(2), EXAMPLE[:1]).macs
    assert sp.cost(pruner.compact(round_to=8), EXAMPLE[:1]).macs <= limit
