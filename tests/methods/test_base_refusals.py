"""Bad input gets an error that says the rule, what was got and what to do; the model stays as it was."""

from __future__ import annotations

import logging

import pytest
import torch
from topologies import TOPOLOGIES
from torch import Tensor, nn

import softprune as sp
from softprune.errors import CheckpointError, ConfigError, ModelError, PlanError

CHAIN = TOPOLOGIES["chain"]


def pruner_of(model: nn.Module | None = None, **options: object) -> sp.SoftPruner:
    return sp.SoftPruner(model or CHAIN.build(), CHAIN.example(), **options)  # type: ignore[arg-type]


class _Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.bn(x)) if x.sum() > 0 else x


def test_a_model_without_batchnorm() -> None:
    with pytest.raises(ModelError, match="without any BatchNorm: there is nothing to prune here"):
        sp.SoftPruner(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), torch.randn(1, 3, 8, 8))


def test_nothing_included() -> None:
    with pytest.raises(ModelError, match="it is not among those you included"):
        pruner_of(include=[])


def test_a_model_whose_batchnorms_are_all_frozen_says_why() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Sigmoid(), nn.Conv2d(8, 2, 1))
    with pytest.raises(ModelError, match=r"sigmoid\(0\) = 0\.5"):
        sp.SoftPruner(model, torch.randn(1, 3, 8, 8))


def test_kinds_of_sites_that_would_help_are_named() -> None:
    linear = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 2, 1))
    example = torch.randn(1, 3, 8, 8)
    with pytest.raises(ModelError, match=r"Use SoftPruner with site_kinds=\('linear',\).*: \"linear\" 1\."):
        sp.SoftPruner(linear, example)
    masked = sp.SoftPruner(linear, example, site_kinds=("linear",))
    assert masked.graph.sites
    masked.detach()
    with pytest.raises(ModelError) as refusal:
        sp.SoftPruner(linear, example, exclude="*")
    assert "site_kinds" not in str(refusal.value)
    assert str(refusal.value).endswith("Change `include` and `exclude`.")


def test_an_example_of_the_wrong_shape() -> None:
    with pytest.raises(ModelError, match=r"the model must accept `example`.*Pass an example"):
        sp.inspect(CHAIN.build(), torch.randn(2, 7, 9, 9))
    joined = type("Joined", (nn.Module,), {"forward": lambda self, x: torch.cat([x, x[:, :, :2]], 1)})()
    with pytest.raises(ModelError, match=r"Sizes of tensors must match except in .* in the list\. Pass an example"):
        sp.inspect(joined, torch.randn(2, 3, 8, 8))
    with pytest.raises(ModelError, match="`example` must be a tensor"):
        sp.inspect(CHAIN.build(), 3)


def test_a_model_that_torch_export_refuses() -> None:
    with pytest.raises(ModelError, match=r"torch\.export refuses _Branching"):
        sp.inspect(_Branching(), torch.randn(2, 3, 8, 8))


def test_contradictory_and_impossible_arguments() -> None:
    name = pruner_of().sites[0].name
    with pytest.raises(ConfigError, match="contradict each other"):
        pruner_of(include=[name], exclude=[name])
    with pytest.raises(ConfigError, match="matches none; there are"):
        pruner_of(exclude=["no.such.layer"])
    with pytest.raises(ConfigError, match="strength"):
        pruner_of(strength=-1.0)
    with pytest.raises(ConfigError, match="round_to"):
        pruner_of(round_to=0)
    with pytest.raises(ConfigError, match="min_channels"):
        pruner_of(min_channels=-1)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"latency_batch": 4}, "`latency_batch` needs a `target`. Got 4 without one"),
        ({"strength": 1e-3, "latency_batch": 1}, "`latency_batch` needs a `target`"),
        ({"target": {"macs": 0.5}, "total_steps": 9, "latency_batch": 1}, "`latency_batch` needs a target of latency"),
        ({"masks": 5}, "`masks` must be a MaskConfig. Got 5"),
        ({"masks": {}}, "`masks` must be a MaskConfig. Got {}"),
        ({"include": 5}, "`include` must be a module name or several"),
        ({"exclude": ["bn1", 5]}, r"`exclude` must be .* Got \['bn1', 5\]; pass a string"),
        ({"exclude": [nn.ReLU()]}, r"Got modules; pass a string or .*named_modules\(\) lists the names"),
    ],
)
def test_arguments_of_the_wrong_kind(options: dict[str, object], says: str) -> None:
    model = CHAIN.build()
    with pytest.raises(ConfigError, match=says):
        pruner_of(model, **options)
    pruner_of(model)  # it was left as it was


def test_inspect_takes_names_only() -> None:
    with pytest.raises(ConfigError, match="`include` must be a module name or several"):
        sp.inspect(CHAIN.build(), CHAIN.example(), include=5)  # type: ignore[arg-type]


def test_a_plan_that_is_none() -> None:
    with pytest.raises(PlanError, match=r"takes a PrunePlan and a model, in this order\. Got a str as the plan"):
        sp.apply_plan("x", CHAIN.build())  # type: ignore[arg-type]


def test_refused_models_stay_plain() -> None:
    model = CHAIN.build()
    classes = [type(module) for module in model.modules()]
    with pytest.raises(ConfigError):
        pruner_of(model, round_to=0)
    assert [type(module) for module in model.modules()] == classes
    assert not model._forward_pre_hooks


def test_parameters_that_are_not_finite() -> None:
    model = CHAIN.build()
    with torch.no_grad():
        next(model.parameters())[0] = float("nan")
    with pytest.raises(ModelError, match=r"must be finite.*go back to a checkpoint"):
        pruner_of(model)
    pruner = pruner_of()
    with torch.no_grad():
        next(pruner.model.parameters())[0] = float("nan")
    with pytest.raises(ModelError, match="must be finite"):
        pruner.compact()


def test_a_plan_for_another_model() -> None:
    plan = pruner_of().plan()
    with pytest.raises(PlanError, match=r"this plan is for .*Chain"):
        sp.apply_plan(plan, TOPOLOGIES["residual"].build())
    wider = CHAIN.build()
    first = next(module for module in wider.modules() if isinstance(module, nn.Conv2d))
    first.weight = nn.Parameter(torch.randn(first.out_channels + 1, *first.weight.shape[1:]))
    with pytest.raises(PlanError, match="build the model with the arguments it was pruned with"):
        sp.apply_plan(plan, wider)


def test_a_site_that_vanished() -> None:
    pruner = pruner_of()
    nn.SyncBatchNorm.convert_sync_batchnorm(pruner.model)
    pruner.model.train()
    with pytest.raises(ModelError, match=r"convert_sync_batchnorm.*before making the pruner"):
        pruner.loss(torch.zeros((), requires_grad=True))
    with pytest.raises(ModelError, match="must stay in place"):
        pruner.plan()


def test_two_pruners_on_one_model() -> None:
    pruner = pruner_of()
    with pytest.raises(ModelError, match="a new pruner needs a network without masks"):
        pruner_of(pruner.model)


def test_optimizers_that_do_not_fit() -> None:
    pruner = pruner_of()
    with pytest.raises(ConfigError, match=r"must train scale and shift of every site"):
        pruner.attach(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
    pruner.attach(torch.optim.SGD(pruner.parameter_groups(1e-4), lr=0.1))
    with pytest.raises(ConfigError, match="attached to one optimizer"):
        pruner.attach(torch.optim.SGD(pruner.parameter_groups(1e-4), lr=0.1))


def test_parameters_that_stop_training_after_the_pruner_is_made() -> None:
    pruner = pruner_of()
    pruner.model.requires_grad_(False)
    pruner.model.get_submodule(pruner.sites[0].name).bias.requires_grad_(True)
    with pytest.raises(ConfigError, match="before you make the pruner"):
        pruner.attach(torch.optim.SGD(pruner.parameter_groups(1e-4), lr=0.1))


def test_a_decayed_shift_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    pruner = pruner_of()
    with caplog.at_level(logging.WARNING):
        pruner.attach(torch.optim.SGD(pruner.model.parameters(), lr=0.1, weight_decay=1e-4))
    assert "weight decay acts on the shifts" in caplog.text
    spared = pruner_of()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        spared.attach(torch.optim.SGD(spared.parameter_groups(weight_decay=1e-4), lr=0.1))
    assert not caplog.text


def test_an_optimizer_that_is_released_no_longer_counts() -> None:
    pruner = pruner_of()
    first, second = (torch.optim.SGD(pruner.model.parameters(), lr=0.1) for _ in range(2))
    assert not pruner.attached
    pruner.attach(first)
    with pytest.raises(ConfigError, match=r"release\(\) the first one"):
        pruner.attach(second)
    first.step()
    pruner.release()
    assert not pruner.attached
    pruner.attach(second)
    first.step()
    second.step()
    assert int(pruner.clock.step) == 2


@pytest.mark.parametrize("broken", [{"clock": None}, {"strength": None}, {"masks": None}, {"strength": -1.0}])
def test_a_state_with_a_broken_part(broken: dict[str, object]) -> None:
    pruner = pruner_of()
    before = pruner.state_dict()
    with pytest.raises((CheckpointError, ConfigError)):
        pruner.load_state_dict({**before, **broken})
    assert pruner.state_dict() == before


@pytest.mark.parametrize("value", [torch.tensor(torch.nan), torch.tensor(-1.0), torch.ones(3)])
def test_a_strength_that_is_no_number(value: Tensor) -> None:
    pruner = pruner_of(strength=0.5)
    with pytest.raises(ConfigError, match="`strength` must be a finite number"):
        pruner.strength = value
    pruner.strength = torch.tensor(0.25)
    assert float(pruner.strength) == 0.25


def test_another_network_of_the_same_class() -> None:
    pruner = pruner_of(nn.Sequential(CHAIN.build()))
    for other in (nn.Sequential(nn.Linear(3, 3)), nn.Sequential(nn.Sequential(CHAIN.build()))):
        for call in (pruner.masks, pruner.plan, pruner.compact):
            with pytest.raises(ModelError, match="a copy of the network that is being pruned"):
                call(other)


def test_a_pruner_that_has_ended() -> None:
    pruner = pruner_of()
    model = pruner.detach()
    calls = (
        pruner.masks,
        pruner.plan,
        pruner.compact,
        pruner.summary,
        lambda: pruner.attach(torch.optim.SGD(model.parameters(), lr=0.1)),
    )
    for call in calls:
        with pytest.raises(ModelError, match=r"cannot be used after detach\(\).*make a new pruner"):
            call()


def test_a_cut_in_inference_mode_can_be_trained() -> None:
    pruner = pruner_of()
    with torch.inference_mode():
        compact = pruner.compact()
    compact.train()(CHAIN.example()).sum().backward()
    assert all(parameter.grad is not None for parameter in compact.parameters())


def test_a_state_of_another_method_or_network() -> None:
    state = pruner_of().state_dict()
    with pytest.raises(CheckpointError, match="same method, sites, floors and settings"):
        pruner_of().load_state_dict({**state, "method": "sfp"})
    with pytest.raises(CheckpointError, match="same method, sites, floors and settings"):
        pruner_of(exclude=[pruner_of().sites[0].name]).load_state_dict(state)


def test_a_state_of_another_strength_says_both() -> None:
    trained, ours = pruner_of(strength=2e-3), pruner_of(strength=1e-3)
    with pytest.raises(CheckpointError, match=r"'strength' is 0\.001; got 0\.002\. .* or set pruner\.strength after"):
        ours.load_state_dict(trained.state_dict())
    trained.strength = 5e-3  # a schedule of one's own
    again = pruner_of(strength=2e-3)
    again.load_state_dict(trained.state_dict())
    assert float(again.strength) == pytest.approx(5e-3)


@pytest.mark.parametrize(
    ("method", "ours", "theirs", "said"),
    [
        ("l1", {"target": {"macs": 0.5}}, {"target": {"macs": 0.4}}, "'target' is 'macs = 0.5'; got 'macs = 0.4'"),
        ("l1", {"ratio": 0.5}, {"ratio": 0.25}, r"is 0\.5; got 0\.25"),
        ("scp", {"cost_weighting": 0.5}, {"cost_weighting": 0.25}, r"'cost_weighting' is 0\.5; got 0\.25"),
        ("slimming", {"ratio": 0.5}, {"ratio": 0.25}, r"'ratio' is 0\.5; got 0\.25"),
    ],
)
def test_a_state_of_other_settings(method: str, ours: dict, theirs: dict, said: str) -> None:
    first, second = (
        sp.methods.REGISTRY[method](CHAIN.build(), CHAIN.example(), **options) for options in (ours, theirs)
    )
    with pytest.raises(CheckpointError, match=said):
        first.load_state_dict(second.state_dict())


@pytest.mark.parametrize("floors", [{"round_to": 4}, {"min_channels": 2}])
def test_a_state_of_a_pruner_with_other_floors(floors: dict[str, int]) -> None:
    (key, value), *_ = floors.items()
    theirs, ours = pruner_of(**floors), pruner_of()
    before = ours.state_dict()
    with pytest.raises(CheckpointError, match=f"'{key}' is {getattr(ours, key)}; got {value}"):
        ours.load_state_dict(theirs.state_dict())
    assert ours.state_dict() == before
    pruner_of(**floors).load_state_dict(theirs.state_dict())


def test_a_model_that_is_no_copy() -> None:
    with pytest.raises(ModelError, match="must be a copy of the network"):
        pruner_of().compact(nn.Linear(2, 2))


def test_buffers_may_be_infinite_and_statistics_may_not() -> None:
    model = CHAIN.build()
    model.register_buffer("causal", torch.full((3, 3), -torch.inf).triu(1))
    assert pruner_of(model).sites
    broken = CHAIN.build()
    norm = next(module for module in broken.modules() if isinstance(module, nn.BatchNorm2d))
    norm.running_mean[0] = torch.nan  # type: ignore[index]
    with pytest.raises(ModelError, match="must be finite"):
        pruner_of(broken)


@pytest.mark.parametrize("strength", [-1.0, float("inf"), float("nan"), True, "a"])
def test_a_strength_is_a_finite_number(strength: object) -> None:
    with pytest.raises(ConfigError, match="finite number of at least 0"):
        pruner_of(strength=strength)


def test_parameters_without_values_are_named() -> None:
    with pytest.raises(ModelError, match="a meta one"):
        pruner_of(CHAIN.build().to("meta"))


def test_what_rounding_keeps_is_said(caplog: pytest.LogCaptureFixture) -> None:
    pruner = pruner_of(round_to=64)
    site = pruner.sites[0]
    with torch.no_grad():
        for each in pruner.sites:
            pruner.model.get_submodule(each.name).bias[:2] = -9.0  # type: ignore[index, operator]
    summary = pruner.summary()
    assert (summary.sites[0].kept, summary.sites[0].rounded) == (site.width, 2)
    assert "2 dead, kept by rounding or a floor" in str(summary)
    with caplog.at_level(logging.WARNING):
        pruner.compact()
    assert "round_to=64 and min_channels=0 keep every dead channel" in caplog.text
    assert "no channel is dead" not in caplog.text


def test_what_is_no_optimizer_and_no_loss_is_named() -> None:
    model = CHAIN.build()
    pruner = pruner_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(ConfigError, match=r"attached to a torch\.optim\.Optimizer\. Got StepLR"):
        pruner.attach(scheduler)  # type: ignore[arg-type]
    pruner.attach(optimizer)
    with pytest.raises(ConfigError, match=r"loss as a tensor.*Got float; leave out \.item\(\)"):
        pruner.loss(3.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [float("nan"), -1.0, "x"])
def test_a_strength_that_is_set_is_checked(value: object) -> None:
    pruner = pruner_of(strength=0.25)
    with pytest.raises(ConfigError, match="finite number of at least 0"):
        pruner.strength = value  # type: ignore[assignment]
    assert float(pruner.strength) == 0.25
