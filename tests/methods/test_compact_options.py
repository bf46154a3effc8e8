"""One decision, several cuts of it: multiples and gathers change the shapes, never what is computed."""

import pytest
import torch
from torch import nn

import softprune as sp
from softprune import models
from softprune.errors import ConfigError
from softprune.graph.modules import Select

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
        with pytest.raises(ConfigError, match="a target is met by one cut"):
            pruner.compact(**options)  # type: ignore[arg-type]
    assert pruner.budget is not None
    assert not pruner.budget.is_final  # nothing was decided by a refused call
    limit = 0.5 * sp.cost(models.PreActResNet(2), EXAMPLE[:1]).macs
    assert sp.cost(pruner.compact(round_to=8), EXAMPLE[:1]).macs <= limit
