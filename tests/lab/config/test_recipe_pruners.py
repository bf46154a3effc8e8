"""Every recipe that is not of the paper builds its network and its pruner, and its target is within reach."""

import pytest
import torch

from softprune import cost, models
from softprune.cut import apply_plan, make_plan
from softprune.lab.config.recipes import load_recipe, recipe_files
from softprune.lab.report import paper_figures
from softprune.lab.train.pruner import make_pruner

OURS = [name for name in recipe_files() if name.startswith(("best-", "finetune-", "tinyimagenet-"))]
# One recipe for each network: that with the smallest target, since building one takes seconds. Every method on its own
# is in the contract tests.
BY_NETWORK = {
    config.model.name: name
    for name, config in sorted(
        ((name, load_recipe(name)) for name in OURS), key=lambda item: -float(item[1].method.target.get("macs", 1))
    )
    if config.method.name != "dense"
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(BY_NETWORK.values()))
def test_a_recipe_builds_its_pruner(name: str) -> None:
    config = load_recipe(name)
    network = models.build(config.model.name, 100)
    example = torch.randn(2, *models.REGISTRY[config.model.name].input_shape)
    pruner = make_pruner(config, network, example, total_steps=10_000)
    assert pruner.sites or pruner.masks()
    assert not [frozen for frozen in pruner.graph.frozen if "trial" in frozen.reason]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tinyimagenet-resnet50-scp-40-ft", "tinyimagenet-resnet50-scp-target-ft"])
def test_two_fifths_of_the_masked_channels_are_about_the_papers_flops(name: str) -> None:
    config = load_recipe(name)
    network, example = models.build(config.model.name, 100), torch.randn(2, 3, 64, 64)
    pruner = make_pruner(config.replace(seed=0), network, example, total_steps=10_000)
    assert {site.name.rpartition(".")[2] for site in pruner.sites} == {"bn1", "bn2"}  # no sums of bn3 and a shortcut
    masks = {site.name: torch.arange(site.width) < 0.6 * site.width for site in pruner.sites}
    compact = apply_plan(make_plan(pruner.graph, pruner.detach(), masks), network)
    cut = 100 - 100 * cost(compact, example).macs / cost(network, example).macs
    assert cut == pytest.approx(paper_figures()[name.removeprefix("tiny")].flops, abs=2.5)
