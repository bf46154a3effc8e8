"""The authors' counting: hand-derived cases for every rule and every quirk of it."""

import pytest
import torch
from torch import Tensor, nn

from softprune import models
from softprune.costs import PaperCounter, cost
from softprune.errors import ConfigError

IMAGE = torch.empty(1, 3, 32, 32)


def count_paper(model, example, masks=None):
    return cost(model, example, counting="paper", masks=masks)


def keep(model: nn.Module, **kept: int) -> dict[str, Tensor]:
    """Masks from ``stages_0_1_bn2=5``: the first channels of that BatchNorm."""
    masks = {}
    for key, count in kept.items():
        name = key.replace("_", ".")
        width = model.get_submodule(name).num_features
        masks[name] = torch.arange(width) < count
    return masks


def test_resnet56_at_a_uniform_half_mask() -> None:
    """The number that METHODS.md derives from the authors' expressions."""
    model = models.resnet56()
    masks = {
        name: torch.arange(module.num_features) % 2 == 0
        for name, module in model.named_modules()
        if isinstance(module, nn.BatchNorm2d) and not name.endswith(".0.bn1")
    }
    counter = PaperCounter(model, IMAGE)
    dense, pruned = counter.count(), counter.count(masks)
    assert 1 - pruned.flops / dense.flops == pytest.approx(0.589, abs=5e-4)
    assert 1 - pruned.params / dense.params == pytest.approx(0.595, abs=5e-4)
    assert pruned.channels == 64 + 1968 // 2


def test_vgg_cuts_both_sides() -> None:
    model = models.digits_net()
    kept = [5, 7, 11, 13, 17, 19]
    names = ["stages_0_0_bn", "stages_0_1_bn", "stages_1_0_bn", "stages_1_1_bn", "stages_2_0_bn", "stages_2_1_bn"]
    found = count_paper(model, torch.empty(1, 1, 8, 8), keep(model, **dict(zip(names, kept, strict=True))))
    flops, params, inputs = 0, 0, 1
    for width, positions in zip(kept, [64, 64, 16, 16, 4, 4], strict=True):
        flops += 2 * positions * (9 * inputs + 1) * width
        params += 9 * inputs * width + 2 * width
        inputs = width
    assert found.flops == flops + 2 * (19 - 1) * 10
    assert found.params == params + (19 + 1) * 10
    assert found.channels == sum(kept)


def test_vgg_with_a_dead_last_layer_has_a_negative_classifier() -> None:
    model = models.digits_net()
    found = count_paper(model, torch.empty(1, 1, 8, 8), keep(model, stages_2_1_bn=0))
    assert found.by_module["stages.2.1.conv"].flops == 0
    assert found.by_module["classifier"].flops == -2 * 10
    assert found.by_module["classifier"].params == 10


def test_densenet_counts_full_norms_and_outputs() -> None:
    model = models.DenseNet(2)  # 24 -> 36 -> 48 | transition | 48 -> 60 -> 72 | transition | 72 -> 84 -> 96
    masks = keep(model, blocks_0_1_bn=7, transitions_0_bn=9, bn=11)
    found = count_paper(model, IMAGE, masks).by_module
    dense = count_paper(model, IMAGE).by_module
    assert (found["blocks.0.1.bn"].params, found["blocks.0.1.bn"].channels) == (2 * 36, 7)
    assert found["blocks.0.1.conv"].params == 9 * 7 * 12
    assert found["blocks.0.1.conv"].flops == 2 * 1024 * (9 * 7 + 1) * 12
    assert found["transitions.0.bn"].params == 2 * 48
    assert found["transitions.0.conv"].params == 9 * 48
    assert found["transitions.0.conv"].flops == 2 * 1024 * (9 + 1) * 48
    assert found["bn"].params == 2 * 96
    assert (found["classifier"].params, found["classifier"].flops) == ((11 + 1) * 10, 2 * (11 - 1) * 10)
    untouched = dense.keys() - {"blocks.0.1.bn", "blocks.0.1.conv", "transitions.0.bn", "transitions.0.conv"}
    assert all(found[name] == dense[name] for name in untouched - {"bn", "classifier"})


def _block(found, name: str) -> tuple[int, int, int]:
    """Parameters, FLOPs and channels of one block, its projection not included."""
    parts = [
        part for key, part in found.by_module.items() if key.startswith(name + ".") and not key.endswith("project")
    ]
    return sum(p.params for p in parts), sum(p.flops for p in parts), sum(p.channels for p in parts)


def test_preact_block() -> None:
    model = models.PreActResNet(2)
    found = count_paper(model, IMAGE, keep(model, stages_1_1_bn1=5, stages_1_1_bn2=7))
    params = 2 * 32 + 9 * 5 * 7 + 2 * 7 + 9 * 7 * 32
    flops = 2 * 256 * ((9 * 5 + 1) * 7 + (9 * 7 + 1) * 32)
    assert _block(found, "stages.1.1") == (params, flops, 5 + 7)


@pytest.mark.parametrize(("first", "second"), [(0, 7), (5, 0), (0, 0)])
def test_preact_block_with_a_dead_norm_is_free(first: int, second: int) -> None:
    model = models.PreActResNet(2)
    found = count_paper(model, IMAGE, keep(model, stages_1_1_bn1=first, stages_1_1_bn2=second))
    assert _block(found, "stages.1.1") == (0, 0, 0)


def test_preact_first_block_does_not_narrow_its_first_convolution() -> None:
    model = models.PreActResNet(2)
    found = count_paper(model, IMAGE, keep(model, stages_1_0_bn2=7))
    params = 2 * 16 + 9 * 16 * 32 + 2 * 7 + 9 * 7 * 32
    flops = 2 * 256 * ((9 * 16 + 1) * 32 + (9 * 7 + 1) * 32)
    assert _block(found, "stages.1.0") == (params, flops, 16 + 7)


def test_preact_first_block_without_a_branch_keeps_its_projection_only() -> None:
    model = models.PreActResNet(2)
    found = count_paper(model, IMAGE, keep(model, stages_1_0_bn2=0))
    assert _block(found, "stages.1.0") == (0, 0, 0)
    project = found.by_module["stages.1.0.project"]
    assert (project.params, project.flops) == (16 * 32, 2 * 256 * (16 + 1) * 32)


def test_preact_head_and_stem() -> None:
    model = models.PreActResNet(2)
    found = count_paper(model, IMAGE, keep(model, bn=9)).by_module
    assert (found["bn"].params, found["bn"].channels) == (2 * 64, 9)
    assert (found["classifier"].params, found["classifier"].flops) == ((9 + 1) * 10, 2 * (9 - 1) * 10)
    assert found["stem"].params == 27 * 16


def test_bottleneck_block() -> None:
    model = models.BottleneckResNet(2)
    masks = keep(model, stages_2_0_bn1=5, stages_2_0_bn2=7, stages_2_0_bn3=11)
    found = count_paper(model, IMAGE, masks)
    params = 2 * 128 + 5 * 7 + 2 * 7 + 9 * 7 * 11 + 2 * 11 + 11 * 256
    # The first convolution of the block still sees 16 x 16 positions, the strided one and its follower 8 x 8.
    flops = 2 * (256 * (5 + 1) * 7 + 64 * (9 * 7 + 1) * 11 + 64 * (11 + 1) * 256)
    assert _block(found, "stages.2.0") == (params, flops, 5 + 7 + 11)
    assert found.by_module["stages.2.0.project"].params == 128 * 256


@pytest.mark.parametrize("dead", ["bn1", "bn2", "bn3"])
def test_bottleneck_block_with_a_dead_norm_is_free(dead: str) -> None:
    model = models.BottleneckResNet(2)
    found = count_paper(model, IMAGE, keep(model, **{f"stages_1_0_{dead}": 0}))
    assert _block(found, "stages.1.0") == (0, 0, 0)
    assert found.by_module["stages.1.0.project"].params == 64 * 128


@pytest.mark.parametrize("model", [models.resnet18(), nn.Conv2d(3, 4, 3)])
def test_other_networks_are_refused_with_the_rule(model: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"rules for the networks of the SCP paper only: vgg16.*counting=\"exact\""):
        count_paper(model, IMAGE)


def test_masks_must_fit() -> None:
    counter = PaperCounter(models.digits_net(), torch.empty(1, 1, 8, 8))
    with pytest.raises(ConfigError, match=r"Got 'stages.9.9.bn'. The model's BatchNorms: stages.0.0.bn"):
        counter.count({"stages.9.9.bn": torch.ones(32)})
    with pytest.raises(ConfigError, match=r"32 for 'stages.0.0.bn'. Got shape \(31,\)"):
        counter.count({"stages.0.0.bn": torch.ones(31)})


def test_a_cut_network_is_refused() -> None:
    model = models.PreActResNet(2)
    block = model.stages[1][1]
    block.bn1 = nn.Sequential(nn.BatchNorm2d(32))  # something that selects channels has taken its place
    with pytest.raises(ConfigError, match=r"not on a cut network. Got a Sequential at 'stages.1.1.bn1'"):
        count_paper(model, IMAGE)


def test_the_share_that_sfp_and_fpgm_state_is_that_of_fractions_of_channels() -> None:
    """docs/methods/sfp.md: 40% of every BatchNorm's channels, not rounded, are 52.63% of the FLOPs."""
    whole = {name: row.flops for name, row in PaperCounter(models.resnet56_a(), IMAGE).count().by_module.items()}
    # A convolution loses its own outputs, and inputs where it reads another one directly: not the stream of shortcuts.
    narrowed = [name for name in whole if name.endswith("conv2")] + ["stages.0.0.conv1"]
    left = sum(0.6 * flops * (0.6 if name in narrowed else 1.0) for name, flops in whole.items())
    assert 100 * (1 - left / sum(whole.values())) == pytest.approx(52.63, abs=0.005)
