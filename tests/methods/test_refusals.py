"""What a pruner refuses, and that a refused network stays as it was."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from method_networks import Chain, batch, sgd, train
from torch import nn

from softprune.errors import CheckpointError, ConfigError, ModelError, SoftpruneError
from softprune.masks import MaskConfig, is_masked
from softprune.methods import REGISTRY, L1Pruner, SoftPruner

NAN = math.nan
IMAGES = batch()[0]


def pruner_of(model: nn.Module | None = None, **options: Any) -> SoftPruner:
    return SoftPruner(model or Chain(), IMAGES, **options)


def without(change_: Callable[[nn.Module], Any]) -> nn.Module:
    model = Chain()
    with torch.no_grad():
        change_(model)
    return model


NETWORKS = {
    "no BatchNorm": (nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), {}, "has no BatchNorm"),
    "no activation that keeps zero": (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Sigmoid(), nn.Conv2d(8, 2, 1)),
        {},
        r"sigmoid\(0\) = 0\.5",
    ),
    "another kind would help": (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 2, 1)),
        {},
        r"site_kinds=\('linear',\)",
    ),
    "nothing included": (Chain(), {"include": []}, "you did not include it"),
    "NaN in a parameter": (without(lambda m: m[0].weight.view(-1)[0].fill_(NAN)), {}, "finite"),
    "NaN in a statistic": (without(lambda m: m[1].running_mean[0].fill_(NAN)), {}, "finite"),
    "no values": (Chain().to("meta"), {}, "a meta one"),
}


@pytest.mark.parametrize("case", NETWORKS)
def test_networks_that_cannot_be_pruned(case: str) -> None:
    model, options, word = NETWORKS[case]
    with pytest.raises(ModelError, match=word):
        pruner_of(model, **options)
    assert not any(is_masked(module) for module in model.modules())
    assert not model._forward_pre_hooks


OPTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("scp", {"include": ["1"], "exclude": ["1"]}, "contradict"),
    ("scp", {"exclude": ["no.such.layer"]}, "matches none"),
    ("scp", {"include": 5}, "`include`"),
    ("scp", {"exclude": [nn.ReLU()]}, "named_modules"),
    *[("scp", {"round_to": value}, "round_to") for value in (0, "fast")],
    ("scp", {"min_channels": -1}, "min_channels"),
    ("scp", {"keep": 1.5}, "`keep`"),
    ("scp", {"keep": {"9": 0.5}}, "matches none"),
    *[
        ("scp", {"keep": {"*": value}}, "`keep` by site")
        for value in ((0.5, 0.2), (0, 0), (0.1, 1.1), (0.5,), "ab", None)
    ],
    ("scp", {"keep": {"*": (0.1, 0.5)}}, "needs a target"),
    ("scp", {"site_kinds": ["streams"]}, "kinds"),
    ("scp", {"final_at": 0.5}, "needs a `target`"),
    ("scp", {"target": {"macs": 0.5}, "total_steps": 9, "latency_table": {}}, "is for latency targets"),
    *[("scp", {"strength": value}, "`strength`") for value in (-1.0, math.inf, NAN, True, "a")],
    ("slimming", {"initial_scale": NAN}, "`initial_scale`"),
    ("variational", {"sigma": "a"}, "`sigma`"),
    ("variational", {"mu_below": None}, "`mu_below`"),
    ("sfp", {"evaluation": "lenient"}, "`evaluation`"),
    ("l1", {"ratio": 1}, "`ratio`"),
    ("l1", {"ratio": {5: 0.5}}, "must match sites"),
    ("l1", {"ratio": {"9": 0.5}}, "matches none"),
    ("l1", {"ratio": 0.5, "target": {"macs": 0.5}}, "exclude each other"),
    ("fpgm", {"ratio_dist": 0.5, "target": {"macs": 0.5}}, "exclude each other"),
    ("l1", {"target": {"macs": 1e-5}}, "within reach"),
    ("l1", {"latency_table": {}}, "needs a `target`"),
    ("scratch", {}, "needs a `plan`"),
]


@pytest.mark.parametrize(("method", "options", "word"), OPTIONS)
def test_options(method: str, options: dict[str, Any], word: str) -> None:
    model = Chain()
    with pytest.raises(SoftpruneError, match=word):
        REGISTRY[method](model, IMAGES, **options)
    assert not any(is_masked(module) for module in model.modules())


@pytest.mark.parametrize(("method", "keyword"), [("scp", "targt"), ("l1", "strength"), ("scratch", "round_to")])
def test_a_keyword_of_no_option(method: str, keyword: str) -> None:
    with pytest.raises(TypeError, match=keyword):
        REGISTRY[method](Chain(), IMAGES, **{"plan": [], keyword: 1} if method == "scratch" else {keyword: 1})


def detached() -> SoftPruner:
    pruner = pruner_of()
    pruner.detach()
    return pruner


def converted() -> SoftPruner:
    pruner = pruner_of()
    nn.SyncBatchNorm.convert_sync_batchnorm(pruner.model)
    return pruner


def beheaded() -> SoftPruner:
    pruner = pruner_of()
    pruner.model[-1] = nn.Linear(3, 7)  # type: ignore[operator]
    return pruner


TASK = torch.zeros((), requires_grad=True)
STATES = {
    "detached": (detached, [SoftPruner.masks, SoftPruner.plan, SoftPruner.compact, SoftPruner.decide], "after detach"),
    "converted": (converted, [SoftPruner.plan, SoftPruner.compact], "convert_sync_batchnorm"),
    "another head": (
        beheaded,
        [lambda p: p.loss(TASK), SoftPruner.plan, SoftPruner.compact, SoftPruner.summary],
        "a classifier",
    ),
    "another class": (pruner_of, [lambda p: p.compact(nn.Linear(2, 2))], "a copy of the pruned network"),
    "other shapes": (pruner_of, [lambda p: p.masks(Chain(4, 5))], "a copy of the pruned network"),
    "masked already": (pruner_of, [lambda p: pruner_of(p.model)], "network without masks"),
}


@pytest.mark.parametrize("case", STATES)
def test_networks_that_have_changed(case: str) -> None:
    make, calls, word = STATES[case]
    pruner = make()
    for call in calls:
        with pytest.raises(ModelError, match=word):
            call(pruner)  # type: ignore[operator]


@pytest.mark.parametrize("method", ["sfp", "fpgm"])
def test_a_cut_over_its_target(method: str) -> None:
    pruner = REGISTRY[method](Chain(), IMAGES, target={"macs": 0.5})  # it decides when training begins
    with pytest.raises(ConfigError, match="must not exceed"):
        pruner.compact()
    sgd(pruner)
    assert pruner.compact()


def test_optimizers_losses_and_strengths() -> None:
    pruner = pruner_of(strength=0.25)
    optimizer = torch.optim.SGD(pruner.model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="scale and shift of every site"):
        pruner.attach(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
    pruner.attach(optimizer)
    pruner.attach(optimizer)  # a cell of a notebook that is run again
    with pytest.raises(ConfigError, match=r"release\(\)"):
        pruner.attach(torch.optim.SGD(pruner.model.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match=r"\.item\(\)"):
        pruner.loss(3.0)  # type: ignore[arg-type]
    for value in (NAN, -1.0, "x", torch.tensor(NAN), torch.ones(3)):
        with pytest.raises(ConfigError, match="`strength`"):
            pruner.strength = value  # type: ignore[assignment]
    assert float(pruner.strength) == 0.25
    with pytest.raises(ConfigError, match="no sparsity loss"):
        pruner_of(target={"macs": 0.5}, total_steps=4).strength = 0.01


@pytest.mark.parametrize("dump", [pickle.dumps, copy.deepcopy])
def test_a_pruner_is_not_pickled(dump: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match="state_dict"):
        dump(pruner_of())


MADE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("scp", {"strength": 1e-3}, {"strength": 2e-3}),
    ("scp", {}, {"round_to": 4}),
    ("scp", {}, {"min_channels": 2}),
    ("scp", {}, {"keep": 0.5}),
    ("scp", {}, {"exclude": ["1"]}),
    ("scp", {}, {"masks": MaskConfig(s=3.0)}),
    ("scp", {"target": {"macs": 0.5}, "total_steps": 4}, {"target": {"macs": 0.5}, "total_steps": 5}),
    ("scp", {}, {"target": {"macs": 0.5}, "total_steps": 4}),
    ("scp", {"target": {"macs": 0.5}, "total_steps": 4}, {}),
    ("l1", {"target": {"macs": 0.5}}, {"target": {"macs": 0.4}}),
    ("l1", {"target": {"macs": 0.5}}, {"target": {"macs": 0.5}, "keep": {"*": (0, 0.9)}}),
    ("l1", {"ratio": 0.5}, {"ratio": 0.25}),
    ("slimming", {"ratio": 0.5}, {"ratio": 0.25}),
]


@pytest.mark.parametrize(("method", "ours", "theirs"), MADE)
def test_the_state_of_a_pruner_that_was_made_otherwise(
    method: str, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    first, second = (REGISTRY[method](Chain(), IMAGES, **options) for options in (ours, theirs))
    before = first.clock.state_dict()
    with pytest.raises(CheckpointError):
        first.load_state_dict({**second.state_dict(), "clock": {**before, "step": 3}})
    assert first.clock.state_dict() == before


@pytest.mark.parametrize("broken", [{"strength": None}, {"strength": NAN}, {"masks": None}, {"method": "sfp"}, None])
def test_a_broken_state(broken: dict[str, object] | None) -> None:
    pruner = pruner_of()
    before = pruner.state_dict()
    with pytest.raises((CheckpointError, ConfigError)):
        pruner.load_state_dict(before | broken if broken else {"clock": before["clock"]})
    assert pruner.state_dict() == before


NUMPY: list[tuple[str, dict[str, Any]]] = [
    ("scp", {"strength": np.float32(1e-4), "round_to": np.int64(2), "min_channels": np.int32(2), "seed": np.int64(3)}),
    ("scp", {"target": {"macs": np.float32(0.5)}, "total_steps": np.int64(8), "final_at": np.float32(0.5)}),
    ("scp", {"masks": MaskConfig(delta=np.float32(0.125))}),
    ("slimming", {"ratio": np.float32(0.5), "initial_scale": np.float32(0.5)}),
    ("fpgm", {"ratio_dist": {"*": np.float32(0.25)}}),
]


@pytest.mark.parametrize(("method", "options"), NUMPY)
def test_numbers_of_numpy_are_taken_and_not_kept(method: str, options: dict[str, Any], tmp_path: Path) -> None:
    pruner = REGISTRY[method](Chain(), IMAGES, **options)
    torch.save(pruner.state_dict(), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True)["method"] == method
    assert pruner.plan(round_to=1).to_json()


# --- what is said in a training loop -----------------------------------------------------------------------------


def test_a_forgotten_loss_and_a_forgotten_optimizer_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    pruner, free = pruner_of(), L1Pruner(Chain(), IMAGES)
    for each in (pruner, free):
        optimizer = sgd(each)
        for _ in range(2):
            each.model(IMAGES).sum().backward()
            optimizer.step()
    assert caplog.text.count("without pruner.loss") == 1
    pruner = pruner_of()
    for _ in range(3):
        pruner.loss(TASK)
    assert caplog.text.count("no optimizer is attached") == 1


def test_a_decayed_shift_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    pruner = pruner_of()
    pruner.attach(torch.optim.SGD(pruner.parameter_groups(weight_decay=1e-4), lr=0.1))
    assert not caplog.text
    pruner.release()
    pruner.attach(torch.optim.SGD(pruner.model.parameters(), lr=0.1, weight_decay=1e-4))
    assert "weight decay acts on the shifts" in caplog.text


def test_steps_after_the_last_one_and_a_training_that_diverges(caplog: pytest.LogCaptureFixture) -> None:
    pruner = pruner_of(target={"macs": 0.5}, total_steps=4)
    train(pruner, sgd(pruner), 8)
    assert caplog.text.count("goes on after total_steps=4") == 1
    pruner = pruner_of(target={"macs": 0.5}, total_steps=100)
    optimizer = sgd(pruner)
    train(pruner, optimizer, 2)
    with torch.no_grad():
        next(iter(pruner.model.parameters())).fill_(NAN)
    with pytest.raises(ModelError, match="diverged"):
        train(pruner, optimizer, 12, first=2)


@pytest.mark.parametrize("masked", [True, False])
def test_a_copy_without_masks_is_cut_with_a_warning(masked: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = Chain()
    before = torch.optim.swa_utils.AveragedModel(model)
    pruner = pruner_of(model)
    pruner.compact(torch.optim.swa_utils.AveragedModel(model) if masked else before)
    assert ("a copy without masks" in caplog.text) == (not masked)


# --- what may be done --------------------------------------------------------------------------------------------


def test_what_holds_model_and_pruner_may_be_copied() -> None:
    holder = nn.Module()  # as a LightningModule whose average is kept
    holder.model = Chain()
    holder.pruner = pruner_of(holder.model)  # type: ignore[assignment]
    copied = copy.deepcopy(holder)
    assert copied.pruner is holder.pruner
    assert copied.model is not holder.model


def test_an_optimizer_that_is_released_no_longer_counts() -> None:
    pruner = pruner_of()
    first, second = (torch.optim.SGD(pruner.model.parameters(), lr=0.1) for _ in range(2))
    pruner.attach(first)
    first.step()
    pruner.release()
    pruner.attach(second)
    first.step()
    second.step()
    assert int(pruner.clock.step) == 2


def test_the_penalty_is_what_the_loss_adds() -> None:
    pruner = pruner_of(strength=0.01)
    task = torch.tensor(2.0, requires_grad=True)
    torch.testing.assert_close(pruner.penalty, pruner.loss(task).detach() - 2.0)
    assert not pruner.penalty.requires_grad
    assert L1Pruner(Chain(), IMAGES).penalty == 0


def test_a_cut_in_inference_mode_can_be_trained() -> None:
    with torch.inference_mode():
        compact = pruner_of().compact()
    compact.train()(IMAGES).sum().backward()
    assert all(parameter.grad is not None for parameter in compact.parameters())


def test_shifts_and_biases_are_spared_from_weight_decay() -> None:
    pruner = pruner_of()
    decayed, spared = pruner.parameter_groups(2e-4)
    names = {id(parameter): name for name, parameter in pruner.model.named_parameters()}
    assert (decayed["weight_decay"], spared["weight_decay"]) == (2e-4, 0.0)
    assert all(names[id(each)].endswith("weight") for each in decayed["params"])
    assert all(names[id(each)].endswith("bias") for each in spared["params"])
    (group,) = L1Pruner(Chain(), IMAGES).parameter_groups(0.1)  # as the authors do
    assert (len(group["params"]), group["weight_decay"]) == (len(names), 0.1)
