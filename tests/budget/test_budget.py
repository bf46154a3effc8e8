"""A target met in a plain PyTorch loop."""

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import softprune as sp
from softprune.budget.budget import KEPT_STRENGTH
from softprune.budget.search import Cut
from softprune.errors import CheckpointError, ConfigError
from softprune.masks import is_masked

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
    return {"macs": cost.macs, "params": cost.params, "channels": pruner.summary().channels}


@pytest.mark.parametrize("target", [{"macs": 0.5}, {"params": "40%"}, {"channels": 70}])
def test_the_target_is_met_in_one_run(target):
    model, pruner, optimizer = build(target=target)
    train(model, pruner, optimizer)
    assert pruner.budget.is_final
    assert float(pruner.strength) == 0.0
    compact = pruner.compact()
    assert not pruner._dead_kept(model), "no kept channel is dead"
    (key,) = target
    kept = figures(pruner, compact)[key]
    assert 0.99 * pruner.budget.limit <= kept <= pruner.budget.limit
    x = torch.randn(5, 1, 6, 6)
    torch.testing.assert_close(compact.eval()(x), model.eval()(x))


def test_the_cut_is_finalised_at_the_latest_and_then_only_removes():
    model, pruner, optimizer = build()
    train(model, pruner, optimizer, 0, 6)
    assert float(pruner.strength) > 0
    assert not pruner.budget.is_final
    train(model, pruner, optimizer, 6, pruner.budget.latest)
    assert pruner.budget.is_final
    allowed = pruner.budget.channels.allowed
    train(model, pruner, optimizer, pruner.budget.latest, STEPS)
    for name, mask in pruner.masks().items():
        assert not (mask & ~allowed[name]).any()


def test_a_cut_can_be_final_earlier():
    budget, usual = (build(total_steps=1000, **settings)[1].budget for settings in ({"final_at": 0.3}, {}))
    assert (budget.latest, usual.latest) == (300, 600)
    assert (budget.earliest, usual.earliest) == (100, 200)
    assert budget.controller.strength > usual.controller.strength, "as in a training of half the length"
    budget.update(299)
    assert not budget.is_final
    budget.update(300)
    assert budget.is_final
    with pytest.raises(CheckpointError, match=r"'final_at' is 0\.6; got 0\.3"):
        usual.check_state(budget.state_dict())


def kill(model, pruner, share):
    """Let channels of every site die, as training would."""
    with torch.no_grad():
        for site in pruner.sites:
            first = round((1 - share) * site.width)
            model.get_submodule(site.name).bias[first:] = -3.0
            model.get_submodule(site.name).weight[first:] = 0.1


def test_a_target_that_is_met_is_finalised_there_and_then():
    model, pruner, _ = build(total_steps=1000)
    budget = pruner.budget
    kill(model, pruner, 0.5)  # the method's own decision is below the limit
    assert budget.update(100) > 0
    assert not budget.is_final, "not in the first fifth"
    assert 0 < budget.update(260) < float(pruner.strength)
    assert budget.is_final
    assert 0.99 * budget.limit <= sp.cost(pruner.compact(), EXAMPLE[:1]).macs <= budget.limit
    assert (budget.finalised_step, budget.next_update(260)) == (260, 280)
    other = build(total_steps=1000)[1]
    other.model.load_state_dict(model.state_dict())
    other.load_state_dict(pruner.state_dict())
    assert (other.budget.finalised_step, other.budget.is_final) == (260, True)
    masks = pruner.masks()
    assert all(torch.equal(masks[name], mask) for name, mask in other.masks().items())


def test_room_left_by_an_overshoot_is_filled_with_regrown_channels():
    model, pruner, _ = build(total_steps=1000)
    kill(model, pruner, 0.8)
    alive = {name: mask.clone() for name, mask in pruner.masks().items()}
    pruner.budget.update(260)
    status = pruner.status
    assert status.regrown > 10
    assert 0.99 * status.limit <= status.cost <= status.limit
    assert not pruner._dead_kept(model)
    assert all((pruner.masks()[name] & mask).equal(mask) for name, mask in alive.items()), "the living stay"
    assert status.finalised_step == 260


def test_a_regrown_filter_is_new_at_every_step_and_as_large_as_the_others():
    model, pruner, _ = build()
    filters, weight = [], model.inner[0].weight.detach()
    for step in (5, 6):
        count = pruner.budget.channels.regrow({site.name: torch.arange(site.width) < 4 for site in pruner.sites}, step)
        assert count == 4 * len(pruner.sites)
        sizes = [rows.square().mean().sqrt() for rows in (weight[:4], weight[4:])]
        assert float(sizes[0]) == pytest.approx(float(sizes[1]), rel=0.2)
        filters.append(weight[:4].clone())
    assert not torch.allclose(*filters)
    pruner.budget.channels.regrow({site.name: torch.ones(site.width, dtype=torch.bool) for site in pruner.sites}, 7)
    assert weight.isfinite().all()


def test_scores_rank_channels_that_are_all_dead():
    model, pruner, _ = build()
    with torch.no_grad():
        model.stem[1].bias.copy_(-torch.linspace(3, 8, 24))
    scores = pruner.budget.channels.scores()["stem.1"]
    assert (scores <= 0).all()
    assert (scores[:-1] > scores[1:]).all()


def test_a_regrown_channel_of_a_transposed_convolution_has_a_fresh_filter():
    up = nn.ConvTranspose2d(4, 6, 2, groups=2)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), up, nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 2, 1))
    pruner = sp.SoftPruner(model, torch.randn(2, 3, 8, 8), target={"macs": 0.5}, total_steps=10)
    before = up.weight.detach().clone()
    pruner.budget.channels.regrow({"2": torch.arange(6) == 4}, step=1)  # the second filter of the second group
    assert (up.weight != before).all((2, 3)).tolist() == [[False] * 3] * 2 + [[False, True, False]] * 2


def test_margin_of_a_cut_and_score_of_a_channel():
    _, pruner, _ = build(total_steps=1000)
    pruner.budget.update(10)
    status = pruner.status
    assert status.margin == 1 - status.dense / status.limit
    assert status.score == pytest.approx(1)
    older = pruner.budget.state_dict()
    older["margin"] = older.pop("score")
    pruner.budget.score = None
    pruner.budget.load_state_dict(older)
    assert pruner.status.score == status.score


def test_room_left_at_the_end_stays_unused_and_is_reported(caplog):
    model, pruner, _ = build(total_steps=1000)
    kill(model, pruner, 0.8)
    with caplog.at_level("WARNING", logger="softprune"):
        pruner.decide()
    assert pruner.status.margin > 0.1
    assert "more channels have died than the target asks for" in caplog.text
    assert not pruner._dead_kept(model)


def test_a_cut_before_its_time_is_told_once(caplog):
    _, pruner, _ = build(total_steps=1000)
    pruner.decide()
    pruner.decide()
    assert caplog.text.count("decided at step 0 of total_steps=1000, and the network has not trained with it") == 1


def test_a_network_of_few_channels_cannot_come_close_to_its_limit(caplog):
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)]
    pruner = sp.SoftPruner(nn.Sequential(*layers), torch.randn(2, 1, 8, 8), target={"macs": 0.6}, total_steps=10)
    pruner.decide()
    assert pruner.status.cost == pytest.approx(pruner.status.dense / 2, rel=0.02)
    assert "under the limit of 950 MACs: one more channel would exceed it" in caplog.text


def test_a_kept_channel_that_dies_is_no_longer_kept():
    model, pruner, _ = build(total_steps=1000)
    kill(model, pruner, 0.5)
    pruner.budget.update(260)
    name, mask = next((name, mask) for name, mask in pruner.masks().items() if mask.sum() > 2)
    channel = int(torch.nonzero(mask)[0])
    bn = model.get_submodule(name)
    with torch.no_grad():
        bn.bias[channel], bn.weight[channel] = -3.0, 0.1
    assert not pruner.masks()[name][channel]
    assert not pruner._dead_kept(model)
    pruner.budget.update(1000)  # too late to regrow
    assert not pruner.budget.channels.allowed[name][channel]


def test_channels_that_the_target_needs_are_protected_before_they_die():
    model, pruner, _ = build(total_steps=1000)
    budget = pruner.budget
    with torch.no_grad():
        for site in pruner.sites:  # one half nearly dead, the other half nearer still
            bn = model.get_submodule(site.name)
            bn.weight.fill_(0.3)
            bn.bias.fill_(-0.42)
            bn.bias[: site.width // 2] = -0.38
    budget.update(10)
    weights = torch.cat(list(budget.channels.weights.values()))
    assert (weights < 0).sum() > 20
    assert (weights == 1).sum() > 20
    kept = budget.channels.scores()
    for name, weight in budget.channels.weights.items():
        if (weight < 0).any() and (weight == 1).any():
            assert kept[name][weight < 0].min() >= kept[name][weight == 1].max()


def test_protection_looks_two_updates_ahead_at_scores_that_fall():
    protection = build()[1].budget.channels.protection
    scores = {"a": torch.tensor([1.0, 0.35, 0.175, 0.0, 0.0])}
    keep = {"a": torch.tensor([True, True, True, True, False])}
    for before in (None, {"a": scores["a"] - 0.1}):
        factors, endangered = protection(scores, before, keep)
        assert factors["a"].tolist() == pytest.approx([1, 1, 0, -1, 1], abs=1e-6)
        assert endangered == 0.25
    factors, endangered = protection(scores, {"a": scores["a"] + 0.1}, keep, 0.5)
    assert factors["a"].tolist() == pytest.approx([0.5, -1 / 7, -0.5, -0.5, 1], abs=1e-6)
    assert endangered == 0.75


def test_channels_that_differ_show_that_a_network_was_trained():
    model, pruner, _ = build()
    assert not pruner.budget.channels.is_trained()
    with torch.no_grad():
        model.last[1].bias[0] += 1e-4
    assert pruner.budget.channels.is_trained()


def test_a_trained_network_keeps_its_features_while_others_are_pushed_out():
    model = Net()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.copy_(torch.linspace(0.5, 1.5, len(module.weight)))
    pruner = sp.SoftPruner(model, EXAMPLE, target={"macs": 0.5}, total_steps=100)
    strength = pruner.budget.controller.strength
    assert strength > 10 * KEPT_STRENGTH
    pruner.budget.update(1)
    weights = torch.cat(list(pruner.budget.channels.weights.values()))
    kept = weights[weights < 1]
    assert 20 < len(kept) < len(weights) - 20
    assert float(kept.max()) * strength == pytest.approx(KEPT_STRENGTH)
    usual = build(total_steps=100)[1].budget
    usual.update(1)
    assert torch.cat(list(usual.channels.weights.values())).min() == 1, "untrained channels are all alike"
    usual.load_state_dict({**pruner.budget.state_dict(), "limit": usual.limit})
    assert usual.was_trained


def test_sampling_continues_in_kept_channels_and_ends_in_removed_ones():
    model, pruner, _ = build()
    bn = model.inner[1]
    with torch.no_grad():  # alive, and often off
        bn.bias.fill_(-0.3)
        bn.weight.fill_(0.25)
        bn.weight[:20] = 1.0
    pruner.decide()
    dropped = ~pruner.masks()["inner.1"]
    assert dropped.any()
    out = []
    bn.register_forward_hook(lambda module, args, y: out.append(y.detach()))
    model.train()
    model(torch.randn(8, 1, 6, 6))
    assert (out[-1][:, dropped] == 0).all()
    masks = pruner.site_masks
    sample = masks.by_site(masks.sample(*masks.parameters()).n)["inner.1"]
    assert (sample[dropped] == 0).all()
    assert 0 < sample[~dropped].min() < 0.999


def test_a_run_that_is_rolled_back_updates_again():
    model, pruner, optimizer = build()
    train(model, pruner, optimizer, 0, 7)
    states = copy.deepcopy((model.state_dict(), pruner.state_dict(), optimizer.state_dict()))
    train(model, pruner, optimizer, 7)
    assert pruner.budget.is_final
    for part, state in zip((model, pruner, optimizer), states, strict=True):
        part.load_state_dict(state)
    assert not pruner.budget.is_final
    updates = []
    update = pruner.budget.update
    pruner.budget.update = lambda step: updates.append(step) or update(step)
    train(model, pruner, optimizer, 7)
    fresh, other, other_optimizer = build()
    for part, state in zip((fresh, other, other_optimizer), states, strict=True):
        part.load_state_dict(state)
    want = []
    update_there = other.budget.update
    other.budget.update = lambda step: want.append(step) or update_there(step)
    train(fresh, other, other_optimizer, 7)
    assert updates == want


@pytest.mark.parametrize(("total", "latest", "trim_at"), [(1000, 600, 900), (200, 120, 150), (60, 30, 30), (2, 1, 1)])
def test_weights_have_time_to_adapt_to_the_cut(total, latest, trim_at):
    _, pruner, _ = build(total_steps=total)
    budget = pruner.budget
    assert (budget.latest, budget.trim_at) == (latest, trim_at)
    steps, step = [], 0
    while (following := budget.next_update(step)) is not None:
        steps.append(step := following)
        if step >= latest:
            budget.finalised_step = latest
    assert steps[-1] == total
    assert {latest, trim_at} <= set(steps)
    assert len(steps) <= 111


def test_compiled_code_sees_strength_and_decision_change_in_place():
    model, pruner, _ = build()
    model.train()
    compiles = []

    def backend(graph, inputs):
        compiles.append(graph)
        return graph.forward

    x, y = next(batches())

    def objective():
        return pruner.loss(F.cross_entropy(model(x), y))

    compiled = torch.compile(objective, backend=backend)
    losses = []
    for final in (False, True):
        if final:
            pruner.decide()
        pruner.strength.fill_(0.01 + final)
        pruner.clock.forward.zero_()
        expected = objective()
        pruner.clock.forward.zero_()
        losses.append(compiled())
        torch.testing.assert_close(losses[-1], expected)
    assert len(compiles) == 1, "nothing is compiled anew"
    assert losses[0] != losses[1]


def test_a_trial_cut_leaves_the_training_as_it_was(caplog):
    model, pruner, optimizer = build()
    train(model, pruner, optimizer, 0, 6)
    with caplog.at_level("WARNING", logger="softprune"):
        trial = pruner.compact()
    assert f"a trial at step 6 of total_steps={pruner.budget.total_steps}" in caplog.text
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


def test_a_final_cut_is_not_changed_by_taking_it(monkeypatch):
    model, pruner, optimizer = build()
    train(model, pruner, optimizer)
    before = copy.deepcopy(pruner.state_dict()["budget"]["allowed"])
    # As if the cut were far below the limit: more would fit.
    monkeypatch.setattr(pruner.budget, "limit", 2 * pruner.budget.limit)
    pruner.compact()
    after = pruner.state_dict()["budget"]["allowed"]
    assert all(torch.equal(mask, after[name]) for name, mask in before.items())


def test_after_an_early_decision_training_continues_softly():
    model, pruner, optimizer = build()
    train(model, pruner, optimizer, 0, 6)
    pruner.decide()
    assert pruner.budget.is_final
    train(model, pruner, optimizer, 6, 7)
    assert not pruner.budget.is_final


def test_a_loop_that_ends_early_still_gets_a_cut_that_fits():
    model, pruner, optimizer = build()
    train(model, pruner, optimizer, 0, 7)
    pruner.decide()
    compact = pruner.compact()
    assert 0.99 * pruner.budget.limit <= sp.cost(compact, EXAMPLE[:1]).macs <= pruner.budget.limit
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
    assert pruner.budget.controller.state_dict() == pruner_b.budget.controller.state_dict()
    assert all(torch.equal(mask, pruner_b.masks()[name]) for name, mask in pruner.masks().items())


def test_a_state_of_another_target_is_refused():
    _, pruner, _ = build()
    _, longer, _ = build(total_steps=STEPS + 1)
    before = longer.state_dict()
    pruner.clock.step.fill_(5)
    with pytest.raises(CheckpointError, match=r"total_steps.*Make the pruner as"):
        longer.load_state_dict(pruner.state_dict())
    assert longer.state_dict()["clock"] == before["clock"], "what is refused changes nothing"
    for broken in (None, {"budget": pruner.state_dict()["budget"]}):
        with pytest.raises(CheckpointError, match=r"what state_dict\(\) returned"):
            pruner.load_state_dict(broken)
    with pytest.raises(ConfigError, match="finite number"):
        pruner.load_state_dict(pruner.state_dict() | {"strength": float("nan")})
    _, other, _ = build(masks=sp.MaskConfig(s=3.0))
    with pytest.raises(CheckpointError, match=r"In this pruner 'masks\.s' is 3\.0; got 2\.0"):
        other.load_state_dict(pruner.state_dict())
    plain = sp.SoftPruner(Net(), EXAMPLE)
    with pytest.raises(CheckpointError, match="with a target"):
        plain.load_state_dict(pruner.state_dict())


def test_an_average_of_weights_is_cut_and_judged_by_the_same_decision():
    model, pruner, optimizer = build()
    average = torch.optim.swa_utils.AveragedModel(model)
    model.train()
    for x, y in batches():
        pruner.loss(F.cross_entropy(model(x), y)).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    compact = pruner.compact(average)
    assert sp.cost(compact, EXAMPLE[:1]).macs <= pruner.budget.limit
    x = torch.randn(5, 1, 6, 6)
    torch.testing.assert_close(compact.eval()(x), average.eval()(x))


def test_an_average_of_weights_evaluates_with_the_decision_as_soon_as_it_is_in_force():
    model, pruner, optimizer = build()
    average = torch.optim.swa_utils.AveragedModel(model)
    train(model, pruner, optimizer)
    assert pruner.budget.is_final
    for site in pruner.graph.sites:
        masks = average.module.get_submodule(site.name).masks
        assert torch.equal(masks.by_site(masks.hard())[site.name], pruner.masks()[site.name])
    name = pruner.graph.sites[0].name
    elsewhere = copy.deepcopy(model).to("meta").get_submodule(name)  # a copy that is moved leaves the decision in place
    assert elsewhere.masks.hard().is_meta
    assert elsewhere.masks.allowed is pruner.site_masks.allowed
    assert bool(pruner.site_masks.in_force)


def test_living_channels_that_are_removed_are_reported(caplog):
    _, pruner, _ = build()
    with caplog.at_level(logging.WARNING, "softprune"):
        pruner.decide()  # nothing has died yet
    assert "channels that must be removed to meet the target are still alive. If the accuracy is too" in caplog.text
    caplog.clear()
    model, pruner, _ = build()
    for site in pruner.graph.sites:
        with torch.no_grad():
            model.get_submodule(site.name).bias[: site.width // 2] = -9
            model.get_submodule(site.name).weight[: site.width // 2] = 0.1
    with caplog.at_level(logging.INFO, "softprune"):
        pruner.decide()
        pruner.budget.log_cut(Cut((), pruner.budget.limit), None, 50, 100)  # the others died by themselves
    assert "still alive" not in caplog.text
    assert "; 50 of 100 removed channels are alive" in caplog.text


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
    assert (macs < 0.99 * pruner.budget.limit) == ("multiples of 8" in caplog.text)


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
        ({"target": {"params": 10**9}}, "below the dense"),
        ({"target": {"latency": 0.9}, "latency_batch": 0}, "`latency_batch` must be an integer of at least 1"),
        ({"target": {"latency": 0.9}, "latency_batch": 2.5}, "`latency_batch` must be an integer of at least 1"),
        ({"final_at": 1}, "`final_at`.*Got 1; "),
    ],
)
def test_contradictions_and_the_impossible_are_refused_and_the_model_is_left_alone(settings, message):
    model = Net()
    with pytest.raises(ConfigError, match=message):
        sp.SoftPruner(model, EXAMPLE, **{"target": {"macs": 0.5}, "total_steps": STEPS, **settings})
    assert type(model.stem[1]) is nn.BatchNorm2d
    assert not model._forward_pre_hooks


def test_flops_are_twice_the_macs_and_the_dense_figure_is_no_target():
    macs = sp.cost(Net(), EXAMPLE).macs
    pruner = sp.SoftPruner(Net(), EXAMPLE, target={"flops": macs}, total_steps=10)
    assert (pruner.status.dense, pruner.status.limit) == (2 * macs, macs)
    with pytest.raises(ConfigError, match="below the dense"):
        sp.SoftPruner(Net(), EXAMPLE, target={"macs": macs}, total_steps=10)


def test_floors_are_those_of_inspect():
    floor = sp.inspect(Net(), EXAMPLE).floor_macs
    sp.SoftPruner(Net(), EXAMPLE, target={"macs": floor}, total_steps=10)
    with pytest.raises(ConfigError, match="within reach"):
        sp.SoftPruner(Net(), EXAMPLE, target={"macs": floor - 1}, total_steps=10)


def test_without_a_target_gates_allow_everything():
    model = Net()
    pruner = sp.SoftPruner(model, EXAMPLE)
    assert any(is_masked(module) for module in model.modules())
    assert pruner.site_masks.allowed is None
    assert float(pruner.strength) == pytest.approx(1e-4)


def test_the_pruner_can_move():
    model, pruner, _ = build()
    pruner.decide()
    model.to(torch.float64)
    kept = pruner.masks()
    model.to("cpu")
    assert all(torch.equal(kept[name], mask) for name, mask in pruner.masks().items())


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
