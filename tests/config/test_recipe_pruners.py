"""Every recipe that is not of the paper builds its network and its pruner, and its target is within reach."""

import pytest
import torch

from softprune import models
from softprune.config.recipes import load_recipe, recipe_files
from softprune.train.pruner import make_pruner

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
    pruner = make_pruner(config.method, network, example, masks=config.masks, seed=config.seed, total_steps=10_000)
    assert pruner.sites or pruner.masks()
