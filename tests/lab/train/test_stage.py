"""A stage has what the configuration says: order of images, step, optimizer and average."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from softprune.distributed import World
from softprune.errors import ConfigError, NonFiniteLoss
from softprune.lab.config.settings import RunConfig
from softprune.lab.data import EpochSampler, load_data
from softprune.lab.data.augment import Mixing
from softprune.lab.train.stage import Stage, first_stage
from softprune.lab.train.step import StepOptions
from softprune.methods import SoftPruner


def stage_of(config: RunConfig) -> Stage:
    return first_stage(config, load_data("digits"), World(0, 1, torch.device("cpu"))).stage


def test_every_setting_reaches_the_step(tiny: Callable[..., RunConfig]) -> None:
    stage = stage_of(
        tiny(
            "seed=7",
            "data.sampling=queue",
            "data.mixup=0.2",
            "data.cutmix=0.3",
            "train.accumulate=2",
            "train.channels_last=true",
            "train.ema=0.9",
            "train.label_smoothing=0.1",
            "train.mode=compile",
            "train.precision=bf16",
            "method.strength_warmup_epochs=2",
            "schedule.warmup_epochs=1",
        )
    )
    assert stage.sampler == EpochSampler(size=1437, batch_size=96, seed=7, queue=True)
    assert stage.step.options == StepOptions(
        mode="compile", bf16=True, channels_last=True, label_smoothing=0.1, mixing=Mixing(mixup=0.2, cutmix=0.3)
    )
    stage.step.batches.begin(0, 0)
    assert len(stage.step.batches.micro_batches(torch.tensor([0]))) == 2
    assert stage.network[3].weight.is_contiguous(memory_format=torch.channels_last)
    assert stage.average is not None
    assert stage.average.decay == 0.9
    assert [stage.strength(step) for step in (14, 29, 30)] == pytest.approx([0.016, 0.032, 0.032])
    assert stage.step.schedule(14) == pytest.approx(0.1)


def test_every_setting_reaches_the_optimizer(tiny: Callable[..., RunConfig]) -> None:
    settings = ("optimizer.momentum=0.8", "optimizer.weight_decay=0.01")
    sgd = stage_of(tiny(*settings, "optimizer.nesterov=false")).optimizer
    assert {(group["momentum"], group["nesterov"]) for group in sgd.param_groups} == {(0.8, False)}
    adamw = stage_of(tiny(*settings, "optimizer.name=adamw", "method.name=dense")).optimizer
    assert isinstance(adamw, torch.optim.AdamW)
    assert {group["betas"][0] for group in adamw.param_groups} == {0.8}
    for optimizer in (sgd, adamw):
        assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0, 0.01}


def test_a_strength_is_that_of_the_method(tiny: Callable[..., RunConfig]) -> None:
    pursued = stage_of(tiny("method.target.macs=0.5"))
    assert isinstance(pursued.pruner, SoftPruner)
    assert pursued.pruner.budget is not None
    assert pursued.pruner.budget.total_steps == 4 * 15
    assert not pursued.pruner.updates_on_step, "the loop updates it, once"
    assert pursued.strength(0) == float(pursued.pruner.strength)
    assert stage_of(tiny("method.name=l1")).strength(0) is None
    assert stage_of(tiny("method.name=dense")).strength(0) is None


def test_no_state_is_saved_after_a_loss_that_is_not_finite(tiny: Callable[..., RunConfig]) -> None:
    stage = stage_of(tiny())
    next(stage.step.epoch(0))
    assert stage.state_dict()["step"]["next"] == 1
    with torch.no_grad():
        stage.network[-1].bias.fill_(float("nan"))
    next(stage.step.epoch(0, start=1))
    with pytest.raises(NonFiniteLoss, match=r"step 1 \(epoch 0, batch 1\)"):
        stage.state_dict()


OTHER_OUTPUTS = """
from tiny_networks import tiny
from torch import nn

class Heads(nn.Sequential):
    def forward(self, x):
        return (super().forward(x),) * 2 if self.training else super().forward(x)

def two_heads(num_classes):
    return Heads(*tiny(num_classes))

def seven_classes(num_classes):
    return tiny(7)
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [("two_heads", "Got tuple in training; build it without"), ("seven_classes", r"Got \(2, 7\) for 2 images")],
)
def test_a_network_with_other_outputs_is_refused(
    tiny: Callable[..., RunConfig], tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / "other_outputs.py").write_text(OTHER_OUTPUTS)
    with pytest.raises(ConfigError, match=message):
        stage_of(tiny(f"model.name=other_outputs:{name}"))
