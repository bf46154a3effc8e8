"""The training step: the same result whichever way it runs, after a resume, and in pieces."""

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from softprune.errors import NonFiniteLoss
from softprune.graph import Site
from softprune.lab.data import ArrayDataset, Augmentation, DataBundle, Mixing, mixed
from softprune.lab.data.batches import EpochSampler, make_batches
from softprune.lab.train import step as step_module
from softprune.lab.train.optim import Schedule, make_sgd
from softprune.lab.train.step import StepOptions, TrainStep
from softprune.masks import Clock, SoftMasks, hook_root_, sparsity_loss
from softprune.methods.pruner import undecayed_biases

CPU = torch.device("cpu")
BATCH, SIZE = 8, 28


class _Masks:
    """A pruner as a step sees it, on real masked BatchNorms."""

    def __init__(self, model, strength=0.01):
        device = next(model.parameters()).device
        self.clock = Clock(seed=5, device=device)
        self.strength = torch.tensor(strength, device=device)
        norms = {name: module for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)}
        self.masks = SoftMasks(model, [Site(name, bn.num_features, "relu") for name, bn in norms.items()], self.clock)
        hook_root_(model, self.masks)
        self.draw_ahead = self.masks.draw_ahead

    def attach(self, optimizer):
        optimizer.register_step_post_hook(lambda *_: self.clock.end_step())

    def loss(self, task):
        return task + self.strength * sum(
            sparsity_loss(bn.bias, bn.weight, self.masks.config) for bn in self.masks.modules
        )

    def state_dict(self):
        return {"clock": self.clock.state_dict()}

    def load_state_dict(self, state):
        self.clock.load_state_dict(state["clock"])


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
        if options.get("channels_last"):
            self.model.to(memory_format=torch.channels_last)
        if images is None:
            images = torch.randn(SIZE, 1, 4, 4, generator=torch.Generator().manual_seed(1))
        data = ArrayDataset.from_arrays(images, torch.arange(SIZE) % 3, device=device)
        bundle = DataBundle(
            name="own",
            num_classes=3,
            input_shape=(1, 4, 4),
            train=data,
            test=data,
            augmentation=Augmentation(pad=1, flip=True),
        )
        self.pruner = _Masks(self.model) if pruned else None
        self.optimizer = make_sgd(undecayed_biases(self.model, 2e-4), lr=0.1)
        if self.pruner is not None:
            self.pruner.attach(self.optimizer)
        sampler = EpochSampler(size=SIZE, batch_size=BATCH, seed=3)
        self.step = TrainStep(
            self.model,
            self.optimizer,
            make_batches(bundle, sampler, device=device),
            schedule=Schedule(base=0.1, kind="step", milestones=(5,)),
            pruner=self.pruner,
            teacher=teacher,
            options=StepOptions(**options),
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


class _Teacher:
    """A teacher as a step sees it."""

    def outputs(self, images):
        return images.flatten(1)[:, :3]

    def joint_loss(self, task, logits, taught, labels):
        return task + F.mse_loss(logits, taught)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch 2.13 warns of linear layers in emulated bf16
@pytest.mark.parametrize(
    "options",
    [{}, {"label_smoothing": 0.1, "mixing": Mixing(mixup=0.4, cutmix=1.0)}, {"teacher": _Teacher()}, {"bf16": True}],
    ids=["plain", "mixing", "teacher", "bf16"],
)
def test_is_what_a_plain_loop_computes(options):
    run, plain = _Run(**options), _Run(**options)
    model, optimizer, pruner, teacher = plain.model, plain.optimizer, plain.pruner, plain.step.teacher
    smoothing, mixing = plain.step.options.label_smoothing, plain.step.options.mixing
    clock, batches, number = Clock(seed=3), plain.step.batches, 0
    sums = []
    for epoch in range(2):
        batches.begin(epoch, 0)
        for position in range(4):
            clock.step.fill_(number)
            images, labels = batches.batch(*batches.rows(torch.tensor([position])), clock)
            share = torch.ones(())
            if mixing:
                draw = mixing.draws(3, [number], (4, 4))[0]
                images, share = mixed(images, draw), draw[5]
            optimizer.param_groups[0]["lr"].fill_(0.1 if number < 5 else 0.01)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=plain.step.options.bf16):
                logits = model(images)
            logits = logits.float()
            own, before = (
                F.cross_entropy(logits, each, label_smoothing=smoothing) for each in (labels, labels.roll(1))
            )
            task = share * own + (1 - share) * before
            joint = task if teacher is None else teacher.joint_loss(task, logits, teacher.outputs(images), labels)
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
    totals = run.step.totals()
    assert totals.images == 4 * BATCH
    means = torch.tensor(sums[4:]).mean(0).tolist()
    assert [totals.loss, totals.penalty, totals.top1] == pytest.approx(means, rel=1e-5)


@pytest.mark.parametrize("pruned", [True, False])
def test_compiled_steps_give_the_same_numbers(pruned):
    run = _Run(pruned=pruned, mode="compile", backend="aot_eager").train()
    assert run.step.mode == "compile"
    assert run.step.startup_seconds > 0
    assert torch.equal(run.result(), _Run(pruned=pruned).train().result())


@pytest.fixture
def graphs(monkeypatch):
    """CUDA graphs played on the CPU: warm-up, undo, a recording that runs nothing, then replays."""

    def fake_capture(body, device, *, trial, undo):
        for _ in range(3):
            trial()
        undo()
        return type("Graph", (), {"replay": staticmethod(body)})

    monkeypatch.setattr(step_module, "capture_graph", fake_capture)
    monkeypatch.setattr(TrainStep, "_captures", True)


def test_the_warm_up_of_a_graph_leaves_no_trace(graphs):
    run = _Run(mode="compile", backend="aot_eager", drop_out=0.5).train()
    assert run.step.mode == "compile"
    assert torch.equal(run.result(), _Run(drop_out=0.5).train().result())


def test_falls_back_and_says_why(caplog):
    with caplog.at_level(logging.WARNING):
        run = _Run(mode="compile", backend="nonsense").train()
    assert run.step.mode == "eager"
    assert "run eagerly: InvalidBackend" in caplog.text
    assert torch.equal(run.result(), _Run().train().result())


def test_a_failure_in_the_middle_of_a_trial_is_undone(monkeypatch, caplog):
    def failing_capture(body, device, *, trial, undo):
        trial()
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(step_module, "capture_graph", failing_capture)
    monkeypatch.setattr(TrainStep, "_captures", True)
    with caplog.at_level(logging.WARNING):
        run = _Run(mode="compile", backend="aot_eager").train()
    assert "RuntimeError: operation not permitted when stream is capturing" in caplog.text
    assert run.step.mode == "eager"
    assert torch.equal(run.result(), _Run().train().result())


@pytest.mark.parametrize("stop", [(0, 1), (0, 3), (1, 2)])
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
    share = second.step._rate
    for group in second.optimizer.param_groups:
        group["lr"] = share
    epoch, start = second.step.state_dict()["epoch"], second.step.state_dict()["next"]
    assert (epoch, start) == (stop[0], stop[1] + 1)
    for number in range(epoch, 3):
        for _ in second.step.epoch(number, start=start if number == epoch else 0):
            pass
    assert torch.equal(second.result(), whole.result())


@pytest.mark.parametrize("check_every", [1, 100])
def test_a_loss_that_is_not_finite_names_its_step_and_images(check_every):
    images = torch.randn(SIZE, 1, 4, 4)
    images[7] = float("nan")
    run = _Run(images=images)
    order = run.step.batches.sampler.indices(0)
    position = int((order == 7).any(1).nonzero()[0])
    done = []
    with pytest.raises(NonFiniteLoss, match=rf"step {position} \(epoch 0, batch {position}\)") as caught:
        done.extend(run.step.epoch(0, check_every=check_every))
    assert caught.value.indices == order[position].tolist()
    assert len(done) == (position if check_every == 1 else 3)
    with pytest.raises(NonFiniteLoss):
        run.step.check()


def test_label_smoothing_and_memory_order():
    plain = _Run(pruned=False).train(1).step.totals().loss
    assert _Run(pruned=False, label_smoothing=0.3).train(1).step.totals().loss != pytest.approx(plain)
    run = _Run(pruned=False, channels_last=True)
    assert run.model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert run.train(1).step.totals().loss == pytest.approx(plain, rel=1e-4)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::UserWarning:torch")  # Inductor's advice: TF32, split reductions
def test_on_a_gpu():
    options = {"device": torch.device("cuda"), "channels_last": True}
    run = _Run(mode="compile", **options).train()
    assert run.step.mode == "compile"
    eager = _Run(mode="eager", **options).train()
    assert torch.allclose(run.result(), eager.result(), rtol=1e-3, atol=1e-4)
    assert torch.allclose(run.result(), _Run().train().result(), rtol=1e-2, atol=1e-2)
