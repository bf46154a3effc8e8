"""The cut that fits, on costs made up for the purpose."""

from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings

from softprune.budget.limit import CutSearch, PrunableNetwork


def search(scores, cost, limit, *, floors=0, round_to=1, coupled=None):
    floors = floors if isinstance(floors, dict) else dict.fromkeys(scores, floors)
    graph = SimpleNamespace(sites=[SimpleNamespace(name=name) for name in scores])
    return CutSearch(scores, PrunableNetwork(graph, None, None, floors, coupled or {}, round_to), cost, limit)


def chain_cost(widths_factor):
    """Costs of a chain of layers: neighbours multiply."""

    def cost(masks):
        kept = [3, *(int(mask.sum()) for mask in masks.values()), 10]
        return float(sum(f * a * b for f, a, b in zip(widths_factor, kept, kept[1:], strict=False)))

    return cost


def chain(widths=(32, 64, 48), *, seed=0, share=0.5, round_to=1, factors=(9, 9, 9, 1)):
    generator = torch.Generator().manual_seed(seed)
    alive = {f"s{i}": torch.rand(width, generator=generator) for i, width in enumerate(widths)}
    cost = chain_cost(factors)
    dense = cost({name: torch.ones(len(column)) for name, column in alive.items()})
    return search(alive, cost, share * dense, floors=1, round_to=round_to), alive


@settings(deadline=None, max_examples=60)
@given(
    widths=st.lists(st.integers(8, 64), min_size=2, max_size=5),
    share=st.floats(0.15, 0.95),
    seed=st.integers(0, 99),
    round_to=st.sampled_from([1, 4]),
)
@example(widths=[8, 8, 11, 11, 11], share=0.671875, seed=1, round_to=4)
def test_never_over_the_limit_and_no_channel_more_would_fit(widths, share, seed, round_to):
    fit, _ = chain(tuple(widths), seed=seed, share=share, round_to=round_to, factors=(9,) * (len(widths) + 1))
    counts = fit.fit()
    floor = fit.cost(fit.at_rank(0))
    assert fit.cost(counts) <= max(fit.limit, floor)
    for site, count in enumerate(counts):
        assert 1 <= count <= widths[site]
        assert count % round_to == 0 or count == widths[site]
        if count < widths[site] and floor <= fit.limit:
            more = list(counts)
            more[site] = min(count + round_to, widths[site])
            assert fit.cost(tuple(more)) > fit.limit


def test_the_default_network_comes_within_two_percent():
    widths, factors = (32, 32, 64, 64, 128, 128), (576, 576, 144, 144, 36, 36, 1)
    for seed in range(20):
        for share in (0.2, 0.5, 0.8):
            fit, _ = chain(widths, seed=seed, share=share, factors=factors)
            assert 0.98 * fit.limit <= fit.cost(fit.fit()) <= fit.limit


def test_the_channels_of_highest_score_stay():
    fit, alive = chain(seed=3)
    for name, mask in fit.masks(fit.fit()).items():
        assert alive[name][mask].min() > alive[name][~mask].max()


RANKED = torch.linspace(0.9, 0.1, 10)
OFF = torch.cat([torch.full((24,), -torch.inf), torch.linspace(0.1, 1, 8)])


def total(masks):
    return float(sum(int(mask.sum()) for mask in masks.values()))


@pytest.mark.parametrize(
    ("scores", "cost", "limit", "options", "counts"),
    [
        pytest.param({"a": RANKED}, total, 4.0, {}, (4,), id="a cost at the limit fits"),
        pytest.param({"a": RANKED}, total, 99.0, {}, (10,), id="everything fits"),
        pytest.param(
            {"a": RANKED, "b": RANKED},
            total,
            0.0,
            {"floors": {"a": 1, "b": 3}, "coupled": {("a", "b"): 1}},
            (3,),
            id="the highest floor of coupled sites holds for all",
        ),
        pytest.param(
            {"a": OFF, "b": torch.linspace(0, 1, 32)},
            total,
            1e9,
            {"floors": 4, "round_to": 2},
            (8, 32),
            id="off stays off",
        ),
        pytest.param(
            {"a": RANKED, "dead": RANKED / 99},
            lambda m: 10.0 * int(m["a"].sum()),
            55.0,
            {},
            (5, 0),
            id="free is not kept",
        ),
        pytest.param({"a": RANKED}, total, 9.0, {"round_to": 4}, (8,), id="multiples of 4"),
        pytest.param({"a": RANKED}, total, 9.0, {"coupled": {("a",): 5}}, (5,), id="whole blocks"),
        pytest.param({"a": OFF}, total, 15.0, {"coupled": {("a",): 4}, "round_to": 8}, (8,), id="both, and off"),
        pytest.param({"a": OFF}, total, 7.0, {"coupled": {("a",): 4}}, (4,), id="blocks that are off stay off"),
        pytest.param({"a": RANKED}, total, 9.0, {"round_to": 8}, (8,), id="multiples of 8"),
        pytest.param({"a": RANKED}, total, 10.0, {"round_to": 8}, (10,), id="a whole width need not be a multiple"),
    ],
)
def test_counts(scores, cost, limit, options, counts):
    assert search(scores, cost, limit, **options).fit() == counts


def test_coupled_sites_keep_the_same_channels():
    generator = torch.Generator().manual_seed(0)
    scores = {f"s{i}": torch.rand(32, generator=generator) for i in range(3)}

    def cost(masks):  # a channel costs where both keep it
        return float(30 * (masks["s0"] & masks["s1"]).sum() + masks["s2"].sum())

    fit = search(scores, cost, 500.0, floors=2, coupled={("s0", "s1"): 1})
    masks = fit.masks(fit.fit())
    assert torch.equal(masks["s0"], masks["s1"])
    assert 470 < cost(masks) <= 500
    least = torch.minimum(scores["s0"], scores["s1"])
    assert least[masks["s0"]].min() > least[~masks["s0"]].max()


@pytest.mark.parametrize(
    ("scores", "kept"),
    [
        ([0.9, 0.0, 0.4, 0.3, 0.5, 0.6], [4, 5]),  # the mean decides, not the best channel
        ([0.1, 0.1, 0.1, 0.1, 0.1, 0.1], [0, 1]),
        ([0.9, 0.9, -torch.inf, 1.0, -torch.inf, 0.2], [0, 3]),  # of alive channels
        ([torch.inf, 0.0, 1.0, 1.0, 2.0, 2.0], [0, 1]),
    ],
)
def test_blocks_are_kept_whole(scores, kept):
    fit = search({"a": torch.tensor(scores), "b": torch.zeros(6)}, total, 2.0, coupled={("a",): 2})
    masks = fit.masks((2, 0))
    assert torch.nonzero(masks["a"]).flatten().tolist() == kept
    assert not masks["b"].any()


def test_equal_scores_are_cut_in_the_order_of_the_channels():
    fit = search({"a": torch.full((6,), 0.5)}, total, 4.0)
    assert fit.masks(fit.fit())["a"].tolist() == [True] * 4 + [False] * 2


def test_a_branch_whose_first_channel_costs_much_stays_where_others_make_room():
    scores = {"trunk": torch.linspace(0.9, 0.5, 10), "branch": torch.linspace(0.4, 0.1, 4)}

    def cost(masks):  # what the trunk writes is read by the branch alone
        trunk, branch = (int(masks[name].sum()) for name in scores)
        return 10.0 + trunk * (8 + branch) if branch else 10.0

    fit = search(scores, cost, 60.0)
    counts = fit.fit()
    assert 55.0 < fit.cost(counts) <= 60.0
    assert all(counts)
