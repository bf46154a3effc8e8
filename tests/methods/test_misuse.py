"""Common mistakes in a training loop are noticed."""

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from method_networks import Chain, batch, sgd, train
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from softprune.cut import remap_optimizer
from softprune.errors import ConfigError, ModelError
from softprune.methods import L1Pruner, SoftPruner, loop_checks


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


def test_steps_in_eval_mode_are_noticed_as_such(caplog: pytest.LogCaptureFixture) -> None:
    pruner = SoftPruner(Chain(), batch()[0])
    optimizer = sgd(pruner)
    pruner.model.eval()
    for _ in range(2):
        pruner.loss(F.cross_entropy(pruner.model(batch()[0]), batch()[1])).backward()
        optimizer.step()
    assert caplog.text.count("with the model in eval mode") == 1
    assert "call model.train() before the forward pass, and pruner.loss(...) before model.eval()" in caplog.text
    assert "without pruner.loss" not in caplog.text


@pytest.mark.parametrize(("method", "warned"), [(SoftPruner, 1), (L1Pruner, 0)])
def test_masked_batch_norms_in_eval_mode_are_noticed(
    method: type[SoftPruner], warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    pruner = method(Chain(), batch()[0])
    optimizer = sgd(pruner)
    step(pruner, optimizer)
    assert "eval mode" not in caplog.text
    for _ in range(2):
        pruner.model.train()
        next(iter(pruner.norms.values())).eval()
        pruner.loss(F.cross_entropy(pruner.model(batch()[0]), batch()[1])).backward()
        optimizer.step()
    assert caplog.text.count(f"Got 1 of {len(pruner.norms)} in eval mode while the model trains") == warned


@pytest.mark.parametrize("what", ["network", "pruner"])
def test_what_was_made_in_inference_mode_cannot_train(what: str) -> None:
    network = None if what == "network" else Chain()
    with torch.inference_mode():
        pruner = SoftPruner(network or Chain(), batch()[0])
    with pytest.raises(ConfigError, match=f"outside of .*inference_mode.* Got a {what} made inside; make it again"):
        sgd(pruner)


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


def test_a_target_that_is_set_later_is_refused() -> None:
    for pruner in (with_target(), SoftPruner(Chain(), batch()[0]), L1Pruner(Chain(), batch()[0], target={"macs": 0.5})):
        before = pruner.target
        with pytest.raises(ConfigError, match=r"set when it is made. Got {'macs': 0.3}.*pruner.detach\(\) or pruner.c"):
            pruner.target = {"macs": 0.3}
        assert pruner.target == before
    assert before is not None
    assert (before.key, before.amount) == ("macs", 0.5)


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


def test_a_replaced_optimizer_is_noticed() -> None:
    pruner = SoftPruner(Chain(), batch()[0])
    sgd(pruner)
    other = torch.optim.SGD(pruner.parameter_groups(), lr=0.1)
    with pytest.raises(ConfigError, match=r"after replacing the optimizer call pruner.release"):
        train(pruner, other, 20)
    assert int(pruner.clock.step) == 0
    pruner.release()
    pruner.attach(other)
    for _ in range(4):
        step(pruner, other)
    assert int(pruner.clock.step) == 4


def test_loading_weights_between_steps_is_no_other_optimizer() -> None:
    pruner = SoftPruner(Chain(), batch()[0])
    optimizer = sgd(pruner)
    saved = copy.deepcopy(pruner.model.state_dict())
    for _ in range(4):
        step(pruner, optimizer)
        pruner.model.load_state_dict(saved)


def test_accumulated_losses_are_no_other_optimizer() -> None:
    pruner = SoftPruner(Chain(), batch()[0])
    optimizer = sgd(pruner)
    for _ in range(3):
        for _ in range(3):
            pruner.loss(F.cross_entropy(pruner.model(batch()[0]), batch()[1])).backward()
        optimizer.step()


@pytest.mark.parametrize(
    "between",
    [lambda loss: loss, lambda loss: loss / 4, lambda loss: 8.0 * (loss / 4), lambda loss: loss.exp().detach() + loss],
)
def test_a_loss_is_not_penalised_twice(between: Callable[[Tensor], Tensor], caplog: pytest.LogCaptureFixture) -> None:
    pruner = SoftPruner(Chain(), batch()[0], strength=1.0)
    sgd(pruner)
    for _ in range(2):
        once = between(pruner.loss(F.cross_entropy(pruner.model(batch()[0]), batch()[1])))
        assert pruner.loss(once) is once
    assert caplog.text.count("called once for each task loss. Got what it returned before") == 1


def test_the_loss_of_a_compiled_function_is_not_penalised_twice(caplog: pytest.LogCaptureFixture) -> None:
    pruner = SoftPruner(Chain(), batch()[0], strength=1.0)
    optimizer = sgd(pruner)
    compiled = torch.compile(lambda *given: pruner.loss(F.cross_entropy(*given)), backend="aot_eager")
    task = torch.compile(F.cross_entropy, backend="aot_eager")
    for _ in range(2):
        once = compiled(pruner.model(batch()[0]), batch()[1]) / 2
        assert pruner.loss(once) is once
        once.backward()
        optimizer.step()
        other = task(pruner.model(batch()[0]), batch()[1])
        assert pruner.loss(other).isclose(other + pruner.penalty)
    assert caplog.text.count("called once for each task loss") == 1
    assert "without pruner.loss" not in caplog.text


@pytest.mark.parametrize(
    ("scaled", "said"),
    [
        (lambda loss, scaler: scaler.scale(loss), "1024"),
        (lambda loss, scaler: scaler.scale([loss / 2])[0] / 4, "1024"),
        (lambda loss, scaler: 1024.0 * loss, ""),
        (lambda loss, scaler: loss * torch.tensor(0.5), ""),
        (lambda loss, scaler: loss * torch.tensor(256.0), ""),
        (lambda loss, scaler: loss * torch.tensor(65536.0), ""),
    ],
)
def test_a_loss_that_a_grad_scaler_has_scaled_is_said(
    scaled: Callable[[Tensor, torch.amp.GradScaler], Tensor], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    pruner = SoftPruner(Chain(), batch()[0])
    sgd(pruner)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(2):
        pruner.loss(scaled(F.cross_entropy(pruner.model(batch()[0]), batch()[1]), scaler)).backward()
    assert caplog.text.count(f"multiplied by {said}") == bool(said)
    assert caplog.text.count("call scaler.scale(pruner.loss(loss))") == bool(said)


@pytest.mark.parametrize("remapped", [True, False])
def test_a_loss_of_the_compact_network_is_said(remapped: bool, caplog: pytest.LogCaptureFixture) -> None:
    pruner = SoftPruner(Chain(), batch()[0], strength=1.0)
    optimizer = sgd(pruner)
    train(pruner, optimizer, 2)
    compact = pruner.compact()
    train(pruner, optimizer, 1)
    assert "none of its parameters" not in caplog.text
    if remapped:
        remap_optimizer(optimizer, pruner.model, compact)
    for _ in range(2):
        pruner.loss(F.cross_entropy(compact(batch()[0]), batch()[1])).backward()
        optimizer.step()
    assert caplog.text.count("Got one that depends on none of its parameters") == 1


def test_losses_of_the_network_itself_are_not_taken_for_others(caplog: pytest.LogCaptureFixture) -> None:
    images, labels = batch()
    pruner = SoftPruner(Chain(), images)
    inside = checkpoint(pruner.model, images.clone().requires_grad_(), use_reentrant=True)
    pruner.loss(F.cross_entropy(inside, labels)).backward()
    pruner.model.load_state_dict(copy.deepcopy(pruner.model.state_dict()), assign=True)
    pruner.loss(F.cross_entropy(pruner.model(images), labels))
    assert "none of its parameters" not in caplog.text


def test_the_checks_walk_the_graph_of_an_ordinary_loss_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pruner = SoftPruner(Chain(), batch()[0])
    train(pruner, sgd(pruner), 1)
    walk, walks = loop_checks._nodes, []

    def counted(loss: Tensor, *depth: int) -> Iterator[Any]:
        walks.append(depth)
        yield from walk(loss, *depth)

    monkeypatch.setattr(loop_checks, "_nodes", counted)
    pruner.loss(F.cross_entropy(pruner.model(batch()[0]), batch()[1]))
    assert len(walks) == 1


def test_a_loss_may_be_read_after_its_backward_pass() -> None:
    pruner = SoftPruner(Chain(), batch()[0])
    loss = F.cross_entropy(pruner.model(batch()[0]), batch()[1]) * torch.tensor(0.5)
    loss.backward()
    assert pruner.loss(loss).isclose(loss + pruner.penalty)


def test_a_loss_of_each_sample_is_said(caplog: pytest.LogCaptureFixture) -> None:
    pruner = SoftPruner(Chain(), batch()[0])
    for _ in range(2):
        pruner.loss(F.cross_entropy(pruner.model(batch()[0]), batch()[1], reduction="none").mean(0, keepdim=True))
    assert "takes one number" not in caplog.text
    for _ in range(2):
        pruner.loss(F.cross_entropy(pruner.model(batch()[0]), batch()[1], reduction="none"))
    assert caplog.text.count("takes one number. Got a loss of shape (6,)") == 1


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


class _Wrapper(torch.optim.Optimizer):
    """As Accelerate's: an Optimizer that has not been initialised, with the real one inside."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:  # type: ignore[override]
        self.optimizer.step()

    def zero_grad(self) -> None:  # type: ignore[override]
        self.optimizer.zero_grad()


def test_a_wrapped_optimizer_is_attached_once() -> None:
    pruner = SoftPruner(Chain(), batch()[0])
    wrapped = _Wrapper(torch.optim.SGD(pruner.parameter_groups(), lr=0.1))
    pruner.attach(wrapped)
    pruner.attach(wrapped.optimizer)  # a cell of a notebook that is run again
    step(pruner, wrapped)
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
