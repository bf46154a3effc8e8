"""The training step: the same result whichever way it runs, after a resume, and in pieces."""

import copy
import logging
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from softprune.errors import ConfigError, NonFiniteLoss
from softprune.lab.config.settings import OptimizerConfig, RunConfig, TrainConfig
from softprune.lab.data import ArrayDataset, Augmentation, DataBundle, EpochSampler
from softprune.lab.train import step as step_module
from softprune.lab.train.step import Teacher, TrainStep, learning_rate, make_optimizer, match_gradients, placed
from softprune.masks import draw_chain
from softprune.methods import SoftPruner
from softprune.methods.distillation import distillation_loss
from softprune.methods.pruner import undecayed_biases
from softprune.rng import Clock

CPU = torch.device("cpu")
BATCH, SIZE = 8, 28


@pytest.fixture(autouse=True)
def quick_compiler(monkeypatch):
    if not torch.cuda.is_available():
        monkeypatch.setattr(TrainStep, "backend", "aot_eager")


class _Run:
    """Everything of a small run."""

    def __init__(self, *, pruned=True, images=None, drop_out=0.0, teacher=None, device=CPU, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(drop_out),
            nn.Linear(64, 3),
        ).to(device)
        placed(self.model, torch.device(device))
        if images is None:
            images = torch.randn(SIZE, 1, 4, 4, generator=torch.Generator().manual_seed(1))
        data = ArrayDataset.from_arrays(images, torch.arange(SIZE) % 3, device=device)
        crops = Augmentation(pad=1, flip=True)
        bundle = DataBundle(train=data, test=data, num_classes=3, augmentation=crops)
        self.pruner = SoftPruner(self.model, bundle.example(device=device), strength=0.01, seed=5) if pruned else None
        self.optimizer = make_optimizer(OptimizerConfig(), undecayed_biases(self.model, 2e-4))
        if self.pruner is not None:
            self.pruner.updates_on_step = False
            self.pruner.attach(self.optimizer)
        sampler = EpochSampler(size=SIZE, batch_size=BATCH, seed=3)
        self.step = TrainStep(
            self.model,
            self.optimizer,
            bundle.batches(sampler, device),
            schedule=lambda step: 0.1 if step < 5 else 0.01,
            pruner=self.pruner,
            teacher=teacher,
            train=TrainConfig(**options),
        )

    def train(self, epochs=2):
        for epoch in range(epochs):
            for _ in self.step.epoch(epoch):
                pass
        return self

    def result(self):
        """All that a run leaves, in one comparable row of numbers."""
        tensors = [*self.model.state_dict().values(), self.step._totals]
        tensors += [self.optimizer.state[p]["momentum_buffer"] for p in self.model.parameters()]
        if self.pruner is not None:
            tensors += [self.pruner.clock.step, self.pruner.clock.forward, self.pruner.strength]
        return torch.cat([tensor.detach().double().flatten().cpu() for tensor in tensors])


TEACHER = Teacher(nn.Sequential(nn.Flatten(), nn.MaxPool1d(5)).eval(), weight=0.3, temperature=2.0)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch 2.13 warns of linear layers in emulated bf16
@pytest.mark.parametrize(
    "options",
    [{}, {"label_smoothing": 0.1}, {"teacher": TEACHER}, {"precision": "bf16"}],
    ids=["plain", "smoothing", "teacher", "bf16"],
)
def test_is_what_a_plain_loop_computes(options):
    run, plain = _Run(**options), _Run(**options)
    model, optimizer, pruner, teacher = plain.model, plain.optimizer, plain.pruner, plain.step.teacher
    smoothing = options.get("label_smoothing", 0.0)
    clock, batches, number = Clock(seed=3), plain.step.batches, 0
    sums = []
    for epoch in range(2):
        batches.begin(epoch, 0)
        for position in range(4):
            clock.step.fill_(number)
            images, labels = batches.batch(torch.tensor([position]), clock)
            optimizer.param_groups[0]["lr"].fill_(0.1 if number < 5 else 0.01)
            optimizer.zero_grad()
            pruner.site_masks.draw_ahead(draw_chain)
            with torch.autocast("cpu", torch.bfloat16, enabled="precision" in options):
                logits = model(images)
            logits = logits.float()
            task = F.cross_entropy(logits, labels, label_smoothing=smoothing)
            joint = task
            if teacher is not None:
                soft = distillation_loss(logits, teacher.network(images), labels, weight=1.0, temperature=2.0)
                joint = 0.3 * soft + 0.7 * task
            objective = pruner.loss(joint)
            objective.backward()
            optimizer.step()
            penalty = (objective - joint).item()
            sums.append([task.item(), penalty, 100 / BATCH * (logits.argmax(1) == labels).sum().item()])
            number += 1
    run.model.eval()
    run.train()
    for mine, theirs in zip(run.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert int(run.pruner.clock.step) == 8
    count, *totals = run.step.totals()
    assert count == 4 * BATCH
    assert totals == pytest.approx(torch.tensor(sums[4:]).mean(0).tolist(), rel=1e-5)


@pytest.mark.usefixtures("played_graphs")
def test_the_warm_up_of_a_graph_leaves_no_trace():
    run = _Run(pruned=False, mode="compile", drop_out=0.5).train()
    assert run.step.mode == "compile"
    assert torch.equal(run.result(), _Run(pruned=False, drop_out=0.5).train().result())


def test_a_failure_in_the_middle_of_a_trial_is_undone_and_steps_run_eagerly(monkeypatch, caplog):
    def failing_capture(body, device, *, trial, undo):
        trial()
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(step_module, "capture_graph", failing_capture)
    monkeypatch.setattr(TrainStep, "_captures", True)
    with caplog.at_level(logging.WARNING):
        run = _Run(mode="compile").train()
        assert "mode eager: mode graph failed: RuntimeError: operation not permitted" in caplog.text
    assert run.step.mode == "eager"
    assert torch.equal(run.result(), _Run().train().result())


@pytest.mark.parametrize("stop", [(0, 3), (1, 2)])
def test_a_resumed_run_is_bit_identical(stop):
    whole = _Run().train(3)
    first = _Run()
    for epoch in range(stop[0] + 1):
        for position in first.step.epoch(epoch):
            if (epoch, position) == stop:
                break
    saved = copy.deepcopy(
        {name: getattr(first, name).state_dict() for name in ("model", "optimizer", "pruner", "step")}
    )
    torch.rand(100)
    second = _Run()
    for name, state in saved.items():
        getattr(second, name).load_state_dict(state)
    for group in second.optimizer.param_groups:
        group["lr"] = second.step._rate
    for number in range(stop[0], 3):
        for _ in second.step.epoch(number, start=stop[1] + 1 if number == stop[0] else 0):
            pass
    assert torch.equal(second.result(), whole.result())


def test_a_loss_that_is_not_finite_names_its_step_and_images():
    images = torch.randn(SIZE, 1, 4, 4)
    images[7] = float("nan")
    run = _Run(images=images)
    order = run.step.batches.sampler.indices(0)
    position = int((order == 7).any(1).nonzero()[0])
    done = []
    place = f"step {position} (epoch 0, batch {position}), with images {int(order[position][0])}"
    with pytest.raises(NonFiniteLoss, match=re.escape(place)):
        done.extend(run.step.epoch(0))
    assert len(done) == 3, "it is noticed at the end of the epoch"
    with pytest.raises(NonFiniteLoss):
        run.step.check()


def test_the_memory_order_changes_nothing(monkeypatch):
    plain = _Run(pruned=False).train(1).step.totals()
    monkeypatch.setattr(step_module, "layout_of", lambda device: torch.channels_last)  # as on a GPU
    run = _Run(pruned=False)
    assert run.model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert run.train(1).step.totals() == pytest.approx(plain, rel=1e-4)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))


def test_sgd_is_pytorchs_own_with_a_number_for_a_rate():
    ours, theirs = network(), network()
    mine = make_optimizer(OptimizerConfig(), undecayed_biases(ours, 2e-4))
    reference = torch.optim.SGD(undecayed_biases(theirs, 2e-4), lr=0.1, momentum=0.9, nesterov=True, foreach=False)
    x = torch.randn(5, 3, 4, 4)
    for step in range(4):
        rate = 0.1 / (step + 1)
        mine.param_groups[0]["lr"].fill_(rate)
        for group in reference.param_groups:
            group["lr"] = rate
        for model, optimizer in ((ours, mine), (theirs, reference)):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_momentum_and_gradients_have_the_memory_order_of_the_weights():
    model = network().to(memory_format=torch.channels_last)
    optimizer = make_optimizer(OptimizerConfig(), undecayed_biases(model, 0.0))
    weight = model[0].weight
    assert optimizer.state[weight]["momentum_buffer"].stride() == weight.stride()
    projection = nn.Conv2d(5, 7, 1, bias=False).weight
    projection.grad = torch.randn(7, 5, 1, 1).as_strided((7, 5, 1, 1), (5, 1, 5, 5))
    expected = projection.grad.clone()
    match_gradients(torch.optim.SGD([projection]))
    assert projection.grad.stride() == projection.stride()
    assert torch.equal(projection.grad, expected)


COSINE = {"kind": "cosine"}


@pytest.mark.parametrize(
    ("sections", "finetune", "rates"),
    [
        ({}, False, {0: 0.1, 80 * 7 - 1: 0.1, 80 * 7: 0.01, 121 * 7 - 1: 0.01, 121 * 7: 0.001, 160 * 7: 0.001}),
        ({"train": {"epochs": 2}, "schedule": COSINE}, False, {0: 0.1, 7: 0.05, 14: 0.0, 99: 0.0}),
        (
            {"train": {"epochs": 2}, "schedule": {**COSINE, "warmup_epochs": 4 / 7}},
            False,
            {0: 0.025, 1: 0.05, 3: 0.1, 4: 0.1, 9: 0.05},
        ),
        ({"schedule": {"milestones": [1], "warmup_epochs": 4 / 7}}, False, {3: 0.1, 6: 0.1, 7: 0.01}),
        ({"schedule": {"kind": "constant"}}, False, {10**6: 0.1}),
        ({"train": {"epochs": 0}}, False, {10**6: 0.1}),
        (
            {"train": {"epochs": 10}, "finetune": {"epochs": 6, "schedule": "step", "milestones": [2, 4], "lr": 0.5}},
            True,
            {70: 0.5, 83: 0.5, 84: 0.05, 98: 0.005},
        ),
    ],
)
def test_learning_rates(sections, finetune, rates):
    rate = learning_rate(RunConfig(**sections), 7, finetune)
    assert {step: rate(step) for step in rates} == pytest.approx(rates)


def test_a_cosine_ends_after_its_warm_up():
    with pytest.raises(ConfigError, match="warm-up"):
        learning_rate(RunConfig(train={"epochs": 2}, schedule={**COSINE, "warmup_epochs": 2.0}), 7)
