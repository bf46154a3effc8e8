"""The authors' counting: hand-derived cases for every rule and every quirk of it."""

import pytest
import torch
from paper.counting import Counted, PaperCounter
from torch import nn

from softprune import models

IMAGE = torch.empty(1, 3, 32, 32)
DIGIT = torch.empty(1, 1, 8, 8)


def counted(model: nn.Module, prefix: str = "", example: torch.Tensor = IMAGE, **kept: int) -> Counted:
    """What modules below `prefix` cost, projections not included, where ``stages_0_1_bn2=5`` keeps five channels."""
    counter = PaperCounter(model, example)
    counter.count({name.replace("_", "."): count for name, count in kept.items()})
    rows = [row for name, row in counter.rows.items() if name.startswith(prefix) and not name.endswith("project")]
    return Counted(sum(r.flops for r in rows), sum(r.params for r in rows), sum(r.channels for r in rows))


def test_resnet56_at_a_uniform_half_mask() -> None:
    """The number that METHODS.md derives from the authors' expressions."""
    model = models.resnet56()
    norms = {name: each.num_features for name, each in model.named_modules() if isinstance(each, nn.BatchNorm2d)}
    counter = PaperCounter(model, IMAGE)
    half = counter.count({name: width // 2 for name, width in norms.items() if not name.endswith(".0.bn1")})
    dense = counter.count()
    assert 1 - half.flops / dense.flops == pytest.approx(0.589, abs=5e-4)
    assert 1 - half.params / dense.params == pytest.approx(0.595, abs=5e-4)
    assert half.channels == 64 + 1968 // 2


def test_vgg_cuts_both_sides() -> None:
    kept = [5, 7, 11, 13, 17, 19]
    names = [f"stages_{stage}_{unit}_bn" for stage in range(3) for unit in range(2)]
    flops, params, inputs = 2 * (19 - 1) * 10, (19 + 1) * 10, 1
    for width, positions in zip(kept, [64, 64, 16, 16, 4, 4], strict=True):
        flops += 2 * positions * (9 * inputs + 1) * width
        params += 9 * inputs * width + 2 * width
        inputs = width
    found = counted(models.digits_net(), example=DIGIT, **dict(zip(names, kept, strict=True)))
    assert found == Counted(flops, params, sum(kept))


def _basic(positions: int, inputs: int, read: int, inner: int, written: int, kept: int) -> Counted:
    """A basic block of 32 channels, its first BatchNorm `inputs` wide, whose convolutions have these widths."""
    params = 2 * inputs + 9 * read * written + 2 * inner + 9 * inner * 32
    return Counted(2 * positions * ((9 * read + 1) * written + (9 * inner + 1) * 32), params, kept)


BASIC, BOTTLENECK, DENSE = models.PreActResNet, models.BottleneckResNet, models.DenseNet
# A first convolution of 16 x 16 positions, the strided one and its follower 8 x 8.
BOTTLENECK_FLOPS = 2 * (256 * (5 + 1) * 7 + 64 * (9 * 7 + 1) * 11 + 64 * (11 + 1) * 256)
BOTTLENECK_PARAMS = 2 * 128 + 5 * 7 + 2 * 7 + 9 * 7 * 11 + 2 * 11 + 11 * 256


@pytest.mark.parametrize(
    ("network", "part", "kept", "expected"),
    [
        (BASIC, "stages.1.1", {"bn1": 5, "bn2": 7}, _basic(256, 32, 5, 7, 7, 5 + 7)),
        (BASIC, "stages.1.1", {"bn1": 0, "bn2": 7}, Counted()),  # a dead BatchNorm frees the block
        (BASIC, "stages.1.1", {"bn1": 5, "bn2": 0}, Counted()),
        (BASIC, "stages.1.0", {"bn2": 7}, _basic(256, 16, 16, 7, 32, 16 + 7)),  # the first convolution is whole
        (BASIC, "stages.1.0", {"bn2": 0}, Counted()),
        (BASIC, "stages.1.0.project", {"bn2": 0}, Counted()),
        (BASIC, "stem", {}, Counted(2 * 1024 * 28 * 16, 27 * 16)),
        (BASIC, "bn", {"": 9}, Counted(0, 2 * 64, 9)),
        (BASIC, "classifier", {"bn": 9}, Counted(2 * (9 - 1) * 10, (9 + 1) * 10)),
        (BOTTLENECK, "stages.2.0", {"bn1": 5, "bn2": 7, "bn3": 11}, Counted(BOTTLENECK_FLOPS, BOTTLENECK_PARAMS, 23)),
        (BOTTLENECK, "stages.1.0", {"bn1": 0}, Counted()),
        (BOTTLENECK, "stages.1.0", {"bn3": 0}, Counted()),
        # 24 -> 36 -> 48 | transition | 48 -> 60 -> 72 | transition | 72 -> 84 -> 96: BatchNorms and outputs are whole.
        (DENSE, "blocks.0.1", {"bn": 7}, Counted(2 * 1024 * (9 * 7 + 1) * 12, 2 * 36 + 9 * 7 * 12, 7)),
        (DENSE, "transitions.0", {"bn": 9}, Counted(2 * 1024 * (9 + 1) * 48, 2 * 48 + 9 * 48, 9)),
    ],
)
def test_rules(network: type[nn.Module], part: str, kept: dict[str, int], expected: Counted) -> None:
    head = part in ("bn", "classifier")
    given = {(name or part) if head else f"{part}.{name}": count for name, count in kept.items()}
    assert counted(network(2), part, **{name.replace(".", "_"): count for name, count in given.items()}) == expected


def test_a_projection_stays_where_its_branch_is_dead() -> None:
    counter = PaperCounter(BASIC(2), IMAGE)
    counter.count({"stages.1.0.bn2": 0})
    assert counter.rows["stages.1.0.project"] == Counted(2 * 256 * (16 + 1) * 32, 16 * 32)


def test_a_dead_last_layer_has_a_classifier_of_negative_flops() -> None:
    assert counted(models.digits_net(), "classifier", DIGIT, stages_2_1_bn=0) == Counted(-2 * 10, 10)


def test_other_networks_have_no_rule() -> None:
    with pytest.raises(ValueError, match="rule"):
        PaperCounter(models.resnet18(), IMAGE).count()


def test_the_share_that_sfp_and_fpgm_state_is_that_of_fractions_of_channels() -> None:
    """docs/methods/sfp.md: 40% of every BatchNorm's channels, not rounded, are 52.63% of the FLOPs."""
    counter = PaperCounter(models.resnet56_a(), IMAGE)
    counter.count()
    whole = {name: row.flops for name, row in counter.rows.items()}
    # A convolution loses its own outputs, and inputs where it reads another one directly: not the stream of shortcuts.
    narrowed = [name for name in whole if name.endswith("conv2")] + ["stages.0.0.conv1"]
    left = sum(0.6 * flops * (0.6 if name in narrowed else 1.0) for name, flops in whole.items())
    assert 100 * (1 - left / sum(whole.values())) == pytest.approx(52.63, abs=0.005)
