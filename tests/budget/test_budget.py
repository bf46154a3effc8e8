"""A target met in a plain PyTorch loop."""

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import softprune as sp
from softprune.budget.budget import ROUNDS, is_trained
from softprune.budget.split import _slopes, joined
from softprune.errors import ConfigError

STEPS = 20


class Net(nn.Module):
    """A residual block between two plain layers; small, but no channel costs more than a few percent."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU())
        self.inner = nn.Sequential(nn.Conv2d(24, 40, 3, padding=1, bias=False), nn.BatchNorm2d(40), nn.ReLU())
        self.outer = nn.Conv2d(40, 24, 3, padding=1, bias=False)
        self.last = nn.Sequential(nn.Conv2d(24, 48, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(48), nn.ReLU())
        self.head = nn.Linear(48, 4)

    def forward(self, x):
        x = self.stem(x)
        return self.head(self.last(x + self.outer(self.inner(x))).mean((2, 3)))


EXAMPLE = torch.zeros(2, 1, 6, 6)


def batches(start=0):
    for step in range(start, STEPS):
        generator = torch.Generator().manual_seed(step)
        y = torch.randint(4, (16,), generator=generator)
        yield torch.randn(16, 1, 6, 6, generator=generator) + y.view(-1, 1, 1, 1), y


def build(seed=0, **settings):
    torch.manual_seed(seed)
    model = Net()
    pruner = sp.SoftPruner(model, EXAMPLE, **{"target": {"macs": 0.5}, "total_steps": STEPS, **settings})
    optimizer = torch.optim.SGD(pruner.parameter_groups(weight_decay=2e-4), lr=0.1, momentum=0.9)
    pruner.attach(optimizer)
    return model, pruner, optimizer


def train(model, pruner, optimizer, start=0, stop=STEPS):
    model.train()
    for _, (x, y) in zip(range(start, stop), batches(start), strict=False):
        pruner.loss(F.cross_entropy(model(x), y)).backward()
        optimizer.step()
        optimizer.zero_grad()


def figures(pruner, compact):
    cost = sp.cost(compact, EXAMPLE[:1])
    figures = {"macs": cost.macs, "params": cost.params, "activations": cost.activations}
    return figures | {"channels": pruner.summary().channels}


@pytest.mark.parametrize("target", [{"macs": 0.5}, {"params": "40%"}, {"activations": 0.6}, {"channels": 70}])
def test_the_target_is_met_in_one_run(target):
    model, pruner, optimizer = build(target=target)
    train(model, pruner, optimizer)
    assert pruner.budget.is_final
    compact = pruner.compact()
    (key,) = target
    kept = figures(pruner, compact)[key]
    assert 0.98 * pruner.budget.limit <= kept <= pruner.budget.limit
    x = torch.randn(5, 1, 6, 6)
    torch.testing.assert_close(compact.eval()(x), model.eval()(x))


def test_hooks_of_a_subclass_leave_the_budget_alone_and_no_round_is_repeated():
    class Counting(sp.SoftPruner):
        steps = 0

        def before_step(self):
            self.steps += 1

    torch.manual_seed(0)
    pruner = Counting(Net(), EXAMPLE, target={"macs": 0.5}, total_steps=STEPS)
    optimizer = torch.optim.SGD(pruner.parameter_groups(weight_decay=2e-4), lr=0.1, momentum=0.9)
    pruner.attach(optimizer)
    first = next(iter(pruner.budget.rounds))
    train(pruner.model, pruner, optimizer, stop=first)
    pruner.update_strength(first)
    assert pruner.budget.done == 1
    train(pruner.model, pruner, optimizer, start=first)
    assert pruner.budget.is_final
    assert pruner.steps == STEPS


def test_a_cut_before_its_time_is_told_once(caplog):
    _, pruner, _ = build(total_steps=1000)
    pruner.decide()
    pruner.decide()
    assert caplog.text.count("made final at step 0 of total_steps=1000, and the network has not trained") == 1


def test_a_network_of_few_channels_cannot_come_close_to_its_limit(caplog):
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)]
    pruner = sp.SoftPruner(nn.Sequential(*layers), torch.randn(2, 1, 8, 8), target={"macs": 0.6}, total_steps=10)
    pruner.decide()
    assert pruner.status.cost == pytest.approx(pruner.status.dense / 2, rel=0.02)
    assert "below the limit of 950 MACs: one more channel would exceed it" in caplog.text


def test_a_run_that_is_rolled_back_ends_the_same():
    model, pruner, optimizer = build()
    train(model, pruner, optimizer, 0, 7)
    states = copy.deepcopy((model.state_dict(), pruner.state_dict(), optimizer.state_dict()))
    ends = []
    for _ in range(2):
        train(model, pruner, optimizer, 7)
        assert pruner.budget.is_final
        ends.append(copy.deepcopy([*model.state_dict().values(), *pruner.masks().values()]))
        for part, state in zip((model, pruner, optimizer), states, strict=True):
            part.load_state_dict(state)
        assert not pruner.budget.is_final
    assert all(map(torch.equal, *ends))


def test_a_trial_cut_leaves_the_training_as_it_was(caplog):
    model, pruner, optimizer = build()
    train(model, pruner, optimizer, 0, 6)
    with caplog.at_level("WARNING", logger="softprune"):
        trial = pruner.compact()
    assert f"preliminary (step 6 of total_steps={pruner.budget.total_steps})" in caplog.text
    assert sp.cost(trial, EXAMPLE[:1]).macs <= pruner.budget.limit
    assert not pruner.budget.is_final
    train(model, pruner, optimizer, 6)
    other, undisturbed, optimizer = build()
    train(other, undisturbed, optimizer)
    for (name, value), theirs in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(value, theirs), name


def test_a_final_cut_is_not_changed_by_cutting_an_average(monkeypatch):
    model, pruner, optimizer = build()
    average = copy.deepcopy(model)
    train(model, pruner, optimizer)
    before = pruner.masks()
    # As if the average's weights folded into less, so that the cut cost more.
    monkeypatch.setattr(pruner.budget, "limit", 0.97 * pruner.budget.limit)
    compact = pruner.compact(average)
    assert sp.cost(compact, EXAMPLE[:1]).macs <= pruner.budget.limit
    assert all(torch.equal(mask, before[name]) for name, mask in pruner.masks().items())
    assert pruner.budget.is_final


def test_a_loop_that_ends_early_still_gets_a_cut_that_fits():
    model, pruner, optimizer = build()
    train(model, pruner, optimizer, 0, 7)
    pruner.decide()
    compact = pruner.compact()
    assert 0.98 * pruner.budget.limit <= sp.cost(compact, EXAMPLE[:1]).macs <= pruner.budget.limit
    x = torch.randn(5, 1, 6, 6)
    torch.testing.assert_close(compact.eval()(x), model.eval()(x))


def test_a_resumed_run_is_the_same_bit_for_bit():
    model, pruner, optimizer = build()
    train(model, pruner, optimizer)
    other, pruner_b, optimizer_b = build()
    for stop, start in ((7, 0), (19, 7)):
        train(other, pruner_b, optimizer_b, start, stop)
        states = copy.deepcopy((other.state_dict(), pruner_b.state_dict(), optimizer_b.state_dict()))
        other, pruner_b, optimizer_b = build(seed=stop)
        for part, state in zip((other, pruner_b, optimizer_b), states, strict=True):
            part.load_state_dict(state)
    train(other, pruner_b, optimizer_b, 19)
    for (name, value), theirs in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(value, theirs), name
    assert torch.equal(pruner.budget.off_at, pruner_b.budget.off_at)
    assert all(torch.equal(mask, pruner_b.masks()[name]) for name, mask in pruner.masks().items())


def test_a_cut_that_weights_made_costlier_is_made_smaller():
    _, pruner, _ = build()
    pruner.decide()
    before = {name: int(mask.sum()) for name, mask in pruner.masks().items()}
    pruner.budget.limit *= 0.97
    pruner.decide()
    after = pruner.masks()
    assert sp.cost(pruner.compact(), EXAMPLE[:1]).macs <= pruner.budget.limit
    assert 0 < sum(before.values()) - sum(int(mask.sum()) for mask in after.values()) <= 6


def test_rounding_holds_and_a_gap_is_reported(caplog):
    _, pruner, _ = build(round_to=8)
    with caplog.at_level(logging.WARNING, logger="softprune"):
        compact = pruner.compact()
    assert all(int(mask.sum()) % 8 == 0 for mask in pruner.masks().values())
    macs = sp.cost(compact, EXAMPLE[:1]).macs
    assert macs <= pruner.budget.limit
    assert (macs < 0.98 * pruner.budget.limit) == ("multiples of 8" in caplog.text)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strength": 1e-4}, "exclude each other"),
        ({"total_steps": None}, "needs `total_steps`"),
        ({"total_steps": 0}, "needs `total_steps`"),
        ({"final_at": "0.3"}, "`final_at`.*Got '0.3'"),
        ({"final_at": 1.5}, "`final_at`.*must be more than 0 and less than 1. Got 1.5"),
        ({"target": None}, "needs a `target`"),
        ({"target": {"macs": 0.5, "params": 0.5}}, "one key"),
        ({"target": {"macs": 1e-4}}, "within reach"),
        ({"target": {"channels": 3}, "min_channels": 10}, "within reach"),
        ({"target": {"channels": 3}, "keep": 0.5}, "keep, min_channels"),
        ({"target": {"params": 10**9}}, "below the value of the dense"),
        ({"final_at": 1}, "`final_at`.*Got 1; "),
    ],
)
def test_contradictions_and_the_impossible_are_refused_and_the_model_is_left_alone(settings, message):
    model = Net()
    with pytest.raises(ConfigError, match=message):
        sp.SoftPruner(model, EXAMPLE, **{"target": {"macs": 0.5}, "total_steps": STEPS, **settings})
    assert type(model.stem[1]) is nn.BatchNorm2d
    assert not model._forward_pre_hooks


def test_flops_are_twice_the_macs():
    macs = sp.cost(Net(), EXAMPLE).macs
    pruner = sp.SoftPruner(Net(), EXAMPLE, target={"flops": macs}, total_steps=10)
    assert (pruner.status.dense, pruner.status.limit) == (2 * macs, macs)


class _WithProduct(nn.Module):
    """A product that no layer makes costs, and no cut makes it cheaper."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.weight, self.head = nn.Parameter(0.02 * torch.randn(16, 500)), nn.Linear(500, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))
        return self.head(x.mean(2).transpose(1, 2) @ self.weight)


def test_operators_without_a_rule_count() -> None:
    torch.manual_seed(0)
    model, images = _WithProduct(), torch.randn(2, 1, 8, 8)
    dense = sp.cost(model, images).macs
    assert sp.inspect(model, images).macs == dense
    pruner = sp.SoftPruner(model, images, target={"macs": 0.8}, total_steps=20)
    optimizer = torch.optim.SGD(pruner.parameter_groups(), lr=0.01)
    pruner.attach(optimizer)
    for _ in range(20):
        optimizer.zero_grad()
        pruner.loss(model(torch.randn(4, 1, 8, 8)).square().mean()).backward()
        optimizer.step()
    compact = pruner.compact()
    assert pruner.plan().macs == sp.cost(compact, images).macs <= 0.8 * dense
    with pytest.raises(ConfigError, match="must be within reach"):
        sp.SoftPruner(_WithProduct(), images, target={"macs": 0.05}, total_steps=20)


def trained(model):
    """Let channels differ, as training would."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.copy_(torch.linspace(0.5, 1.5, len(module.weight)))
    return model


@pytest.mark.parametrize("total", [1, 2, 5, 20, 1000])
@pytest.mark.parametrize("final_at", [None, 0.1, 0.9])
def test_rounds_follow_each_other_and_end_in_time(total, final_at):
    for model, default in ((Net(), 0.6), (trained(Net()), 0.3)):
        budget = sp.SoftPruner(model, EXAMPLE, target={"macs": 0.5}, total_steps=total, final_at=final_at).budget
        assert budget.final_at == (final_at or default)
        assert is_trained(budget.site_masks) == (default == 0.3)
        begins, ends = [*budget.rounds], [*budget.rounds.values()]
        assert begins == sorted(set(begins))
        assert ends[:-1] == begins[1:]
        assert ends[-1] == budget.final_step == max(1, round(budget.final_at * total))
        assert total < 100 or len(begins) == ROUNDS


def test_chosen_channels_fade_and_the_others_are_left_alone():
    model, pruner, optimizer = build(total_steps=STEPS)
    masks, budget = pruner.site_masks, pruner.budget
    first = next(iter(budget.rounds))
    train(model, pruner, optimizer, 0, first)
    assert torch.equal(masks.sample(*masks.parameters()).n, torch.ones(masks.layout.channels)) == (budget.done == 0)
    seen = []
    for step in range(first, STEPS):
        train(model, pruner, optimizer, step, step + 1)
        stays = budget.off_at == budget.off_at.max()
        n = masks.sample(*masks.parameters()).n
        assert (n[stays] == 1).all()
        assert (n[budget.off_at <= step + 1] == 0).all()
        seen.append(int(masks.hard().sum()))
    assert seen == sorted(seen, reverse=True)
    assert len(set(seen)) > 2, "in several rounds"
    assert len(set(seen[budget.final_step - first :])) == 1, "after the last round nothing changes"


class Uneven(nn.Module):
    """Two branches: the first one does nothing for the outputs."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.idle = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.busy = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.out_idle, self.out_busy = (nn.Conv2d(16, 16, 1, bias=False) for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.out_idle(self.idle(x))
        return self.head((x + self.out_busy(self.busy(x))).mean((2, 3)))


def test_a_branch_that_the_outputs_do_not_miss_goes_whole():
    torch.manual_seed(0)
    model = trained(Uneven())
    with torch.no_grad():
        model.out_idle.weight.mul_(1e-4)
        model.idle[1].weight.mul_(3)  # scales say nothing about use
    pruner = sp.SoftPruner(model, EXAMPLE, target={"macs": 0.6}, total_steps=STEPS)
    optimizer = torch.optim.SGD(pruner.parameter_groups(), lr=1e-3)
    pruner.attach(optimizer)
    train(model, pruner, optimizer)
    kept = {name: int(mask.sum()) for name, mask in pruner.masks().items()}
    assert kept["idle.1"] <= 4
    assert kept["busy.1"] == 16


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("lr", [0.0, 1e-5, 10.0])
def test_no_learning_rate_breaks_the_limit(optimizer, lr):
    model = trained(Net())
    pruner = sp.SoftPruner(model, EXAMPLE, target={"macs": 0.4}, total_steps=STEPS)
    stepper = optimizer(pruner.parameter_groups(), lr=lr)
    pruner.attach(stepper)
    model.train()
    for x, y in batches():
        pruner.loss(F.cross_entropy(model(x).clamp(-50, 50), y)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        stepper.step()
        stepper.zero_grad()
    compact = pruner.compact()
    assert sp.cost(compact, EXAMPLE[:1]).macs <= pruner.budget.limit
    assert all(int(mask.sum()) for name, mask in pruner.masks().items() if name != "inner.1")


def test_batchnorm_statistics_follow_a_short_training(caplog):
    model = trained(Net())
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.01
    with caplog.at_level(logging.INFO, "softprune"):
        sp.SoftPruner(model, EXAMPLE, target={"macs": 0.5}, total_steps=100)
    assert "momentum" in caplog.text
    assert 0.05 < model.stem[1].momentum <= 0.1
    long = trained(Net())
    long.stem[1].momentum = 0.01
    sp.SoftPruner(long, EXAMPLE, target={"macs": 0.5}, total_steps=10**5)
    assert long.stem[1].momentum == 0.01


def test_small_batches_are_measured_together_and_saved():
    model, pruner, optimizer = build(total_steps=100)
    train(model, pruner, optimizer, 0, 7)
    masks = pruner.site_masks
    assert len(masks.inputs) == 7
    assert len(pruner.state_dict()["budget"]["inputs"]) == 7
    model(torch.zeros(200, 1, 6, 6))
    assert [len(args[0]) for args, _ in masks.inputs] == [200]
    assert not pruner.state_dict()["budget"]["inputs"], "the next step replaces them"
    assert not copy.deepcopy(model).get_submodule("stem.1").masks.inputs


X, Y = torch.zeros(4, 1, 6, 6), torch.zeros(4, 1, 8, 8)


@pytest.mark.parametrize(
    ("calls", "sizes"),
    [
        ([((X,), {})] * 10, [32, 8]),
        ([((X,), {"mask": X, "flag": True})] * 3, [12]),
        ([((X,), {}), ((Y,), {})], [4, 4]),  # of several sizes
        ([((X, torch.ones(6)), {})] * 2, [4, 4]),  # a tensor without samples
        ([((X,), {"flag": True}), ((X,), {"flag": False})], [4, 4]),
    ],
)
def test_batches_are_measured_in_one_forward_where_they_can(calls, sizes):
    assert [len(args[0]) for args, _ in joined(calls)] == sizes


def test_a_network_for_one_batch_size_is_measured_batch_by_batch():
    model, pruner, _ = build(total_steps=100)
    seen = []

    def check(module, args):
        seen.append(len(args[0]))
        assert len(args[0]) == 16, "one batch size"

    hook = model.register_forward_pre_hook(check)
    for x, _ in [*batches()][:3]:
        model(x)
    pruner.budget._choose(model)
    hook.remove()
    assert seen[3] == 48
    assert set(seen[4:]) == {16}


def test_a_measurement_normalises_by_the_batch_and_leaves_no_trace():
    model, pruner, _ = build(target={"macs": 0.5}, total_steps=STEPS)
    model.train()
    x = torch.randn(16, *EXAMPLE.shape[1:])
    model(x)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    seen = []
    hook = norms[-1].register_forward_hook(lambda module, args, output: seen.append(output.mean((0, 2, 3))))
    for norm in norms:
        norm.running_mean.add_(5.0)  # statistics of another network
    pruner.budget._choose(model)
    hook.remove()
    torch.testing.assert_close(seen[0], norms[-1].bias.detach(), atol=1e-4, rtol=0)  # centred by the batch
    for norm in norms:
        norm.running_mean.sub_(5.0)
    assert all(torch.allclose(value, before[name], atol=1e-5) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    ("counts", "divergence", "freed", "slopes"),
    [
        ([1, 2, 4], [1.0, 3.0, 9.0], (1.0, 4.0), [1.0, 2.0, 3.0]),
        ([1, 2, 4], [4.0, 5.0, 4.0], (1.0, 4.0), [1.25, 1.25, 1.25]),  # a branch that is cheaper to lose whole
        ([2], [3.0], (6.0, 6.0), [0.5]),
        ([2], [3.0], (0.0, 0.0), [float("inf")]),  # frees nothing
        ([], [], (), []),
    ],
)
def test_the_lower_hull_of_a_curve(counts, divergence, freed, slopes):
    assert _slopes(counts, divergence, *freed) == slopes
