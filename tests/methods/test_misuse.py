"""Common mistakes in a training loop are noticed."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from method_networks import Chain, batch, sgd, train
from torch import nn
from torch._dynamo.testing import CompileCounter

from softprune.errors import ConfigError, ModelError
from softprune.methods import L1Pruner, SoftPruner


def step(pruner: SoftPruner, optimizer: torch.optim.Optimizer, *, forget: bool = False) -> None:
    images, labels = batch()
    loss = F.cross_entropy(pruner.model.train()(images), labels)
    (loss if forget else pruner.loss(loss)).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_forgotten_loss_is_noticed_by_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    pruner = SoftPruner(Chain(), batch()[0])
    optimizer = sgd(pruner)
    step(pruner, optimizer)
    assert "without pruner.loss" not in caplog.text
    step(pruner, optimizer, forget=True)
    step(pruner, optimizer, forget=True)
    assert caplog.text.count("without pruner.loss") == 1
    assert "softprune" in caplog.records[-1].getMessage()


def with_target(**options: Any) -> SoftPruner:
    return SoftPruner(Chain(), batch()[0], target={"macs": 0.5}, total_steps=4, **options)


def test_steps_after_the_last_one_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    pruner = with_target()
    optimizer = sgd(pruner)
    train(pruner, optimizer, 4)
    assert "total_steps" not in caplog.text
    train(pruner, optimizer, 8, first=4)
    assert caplog.text.count("training goes on after total_steps=4: the cut was final after step 2 and stays") == 1
    status = pruner.status
    assert status is not None
    assert status.cost <= status.limit


def test_a_misspelled_keyword_is_said_with_what_was_meant() -> None:
    with pytest.raises(TypeError, match=r"^SoftPruner got .* 'targt'\. Did you mean 'target'\?$"):
        SoftPruner(Chain(), batch()[0], targt={"macs": 0.5})  # type: ignore[call-arg]
    with pytest.raises(
        TypeError, match=r"'pruning_ratio'\. In softprune it is `target`, what stays: {\"macs\": 0\.5}; L1"
    ):
        SoftPruner(Chain(), batch()[0], pruning_ratio=0.5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^L1Pruner got .* 'ratios'\. Did you mean 'ratio'\?$"):
        L1Pruner(Chain(), batch()[0], ratios=0.5)  # type: ignore[call-arg]


def test_a_strength_beside_a_target_is_refused() -> None:
    pruner = with_target()
    before = float(pruner.strength)
    with pytest.raises(ConfigError, match=r"adjusts the strength itself. Got strength = 0.01; set it for"):
        pruner.strength = 0.01
    assert float(pruner.strength) == before


def test_a_pruner_with_a_target_that_has_ended() -> None:
    pruner = with_target()
    pruner.detach()
    for call in (pruner.compact, pruner.decide, pruner.masks, pruner.summary, lambda: pruner.status):
        with pytest.raises(ModelError, match=r"cannot be used after detach\(\).*make a new pruner"):
            call()


def test_a_method_without_a_penalty_needs_no_loss(caplog: pytest.LogCaptureFixture) -> None:
    pruner = L1Pruner(Chain(), batch()[0])
    optimizer = sgd(pruner)
    F.cross_entropy(pruner.model(batch()[0]), batch()[1]).backward()
    optimizer.step()
    assert "without pruner.loss" not in caplog.text


def test_losses_of_micro_batches_and_of_two_pruners_are_penalised_each(caplog: pytest.LogCaptureFixture) -> None:
    pruners = [SoftPruner(Chain(), batch()[0], strength=1.0) for _ in range(2)]
    for pruner in pruners:
        sgd(pruner)
    for _ in range(3):
        task = sum(F.cross_entropy(pruner.model(batch()[0]), batch()[1]) for pruner in pruners)
        total = pruners[1].loss(pruners[0].loss(task))
        assert total.isclose(task + pruners[0].penalty + pruners[1].penalty)
        total.backward()
    assert "called once" not in caplog.text


def test_a_head_replaced_after_the_pruner_was_made() -> None:
    pruner = SoftPruner(Chain(), batch()[0])
    train(pruner, sgd(pruner), 1)
    pruner.model[-1] = nn.Linear(3, 7)  # type: ignore[operator]
    for call in (pruner.plan, pruner.compact, pruner.summary):
        with pytest.raises(ModelError, match=r"replace layers, a classifier for example, before"):
            call()


@pytest.mark.parametrize("dump", [pickle.dumps, copy.deepcopy])
def test_a_pruner_is_not_pickled(dump: object) -> None:
    pruner = SoftPruner(Chain(), batch()[0])
    with pytest.raises(TypeError, match=r"Save pruner.state_dict\(\)"):
        dump(pruner)  # type: ignore[operator]


def test_what_holds_model_and_pruner_may_be_copied() -> None:
    holder = nn.Module()  # as a LightningModule whose average is kept
    holder.model = Chain()
    holder.pruner = SoftPruner(holder.model, batch()[0])  # type: ignore[assignment]
    copied = copy.deepcopy(holder)
    assert copied.pruner is holder.pruner
    assert copied.model is not holder.model


def test_an_optimizer_is_attached_once() -> None:
    pruner = SoftPruner(Chain(), batch()[0])
    pruner.attach(optimizer := torch.optim.SGD(pruner.parameter_groups(), lr=0.1))
    pruner.attach(optimizer)  # a cell of a notebook that is run again
    step(pruner, optimizer)
    assert int(pruner.clock.step) == 1
    with pytest.raises(ConfigError, match="Got a second one"):
        pruner.attach(torch.optim.SGD(pruner.parameter_groups(), lr=0.1))


def test_a_compiled_step_leaves_the_work_after_it_to_python() -> None:
    pruner = SoftPruner(Chain(), batch()[0], target={"macs": 0.5}, total_steps=4)
    optimizer = sgd(pruner)
    frames = CompileCounter()

    pruner.loss(F.cross_entropy(pruner.model(batch()[0]), batch()[1])).backward()
    compiled = torch.compile(lambda: optimizer.step(), backend=frames)
    for _ in range(4):
        compiled()
    assert pruner.budget is not None
    assert pruner.budget.finalised_step is not None
    assert frames.frame_count < 10


@pytest.mark.parametrize("masked", [True, False])
def test_a_copy_without_masks_is_cut_with_a_warning(masked: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = Chain()
    before = torch.optim.swa_utils.AveragedModel(model)
    pruner = SoftPruner(model, batch()[0])
    pruner.compact(torch.optim.swa_utils.AveragedModel(model) if masked else before)
    assert ("a copy without masks" in caplog.text) == (not masked)


def test_the_penalty_is_what_the_loss_adds() -> None:
    pruner = SoftPruner(Chain(), batch()[0], strength=0.01)
    task = torch.tensor(2.0, requires_grad=True)
    torch.testing.assert_close(pruner.penalty, pruner.loss(task).detach() - 2.0)
    assert not pruner.penalty.requires_grad
    assert L1Pruner(Chain(), batch()[0]).penalty == 0
