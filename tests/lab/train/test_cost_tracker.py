"""What a network costs in training: the paper's counting runs one forward, however often it is asked."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from softprune import SoftPruner, cost, models
from softprune.costs import paper
from softprune.lab.data import load_data
from softprune.lab.train.history import CostTracker, SiteHistory


def test_the_papers_counting_reads_the_network_once(monkeypatch: pytest.MonkeyPatch) -> None:
    data, dense = load_data("digits"), models.build("digits_net", 10)
    forwards = []
    tracker = CostTracker(dense, data)
    network = models.build("digits_net", 10)
    pruner = SoftPruner(network, data.example())
    sites = SiteHistory.of(pruner)
    for share in (0.0, 0.25, 0.5):
        with torch.no_grad():
            for site in pruner.sites:
                bn = network.get_submodule(site.name)
                bn.bias[: int(share * site.width)] = -9.0
        with monkeypatch.context() as patch:
            patch.setattr(paper, "count_exact", lambda *given: forwards.append(given))
            kept = tracker.kept(pruner, sites)
        counted = cost(dense, data.example(1), counting="paper", masks=pruner.masks())
        found = (kept.paper_flops, kept.paper_params, kept.paper_channels)
        assert found == (counted.flops, counted.params, counted.channels)
    assert not forwards


class OtherVgg(models.VGG):
    """Counted by no rule of the paper: one of its layers is another one."""

    def __init__(self) -> None:
        super().__init__(((8,), (8,)), in_channels=1)
        self.classifier = nn.Sequential(nn.Linear(8, 10))


@pytest.mark.parametrize(
    "make", [lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 10)), OtherVgg]
)
def test_other_networks_have_no_such_count(make: Callable[[], nn.Module]) -> None:
    assert CostTracker(make(), load_data("digits")).dense.paper_flops is None
