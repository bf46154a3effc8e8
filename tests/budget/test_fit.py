"""The cut that fits, on costs made up for the purpose."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings

from softprune.budget.search import Cut, CutSearch


def chain_cost(widths_factor):
    """Costs of a chain of layers: neighbours multiply."""

    def cost(masks):
        kept = [3, *(int(mask.sum()) for mask in masks.values()), 10]
        return float(sum(f * a * b for f, a, b in zip(widths_factor, kept, kept[1:], strict=False)))

    return cost


def fitter(widths=(32, 64, 48), *, seed=0, share=0.5, round_to=1, floor=1, factors=(9, 9, 9, 1)):
    generator = torch.Generator().manual_seed(seed)
    alive = {f"s{i}": torch.rand(width, generator=generator) for i, width in enumerate(widths)}
    cost = chain_cost(factors)
    dense = cost({name: torch.ones(len(column)) for name, column in alive.items()})
    return CutSearch(alive, dict.fromkeys(alive, floor), round_to, cost, share * dense)


@settings(deadline=None, max_examples=60)
@given(
    widths=st.lists(st.integers(8, 64), min_size=2, max_size=5),
    share=st.floats(0.15, 0.95),
    seed=st.integers(0, 99),
    round_to=st.sampled_from([1, 4]),
)
@example(widths=[8, 8, 11, 11, 11], share=0.671875, seed=1, round_to=4)
def test_never_over_the_limit_and_no_channel_more_would_fit(widths, share, seed, round_to):
    fit = fitter(tuple(widths), seed=seed, share=share, round_to=round_to, factors=(9,) * (len(widths) + 1))
    cut = fit.fit()
    assert cut.cost == fit.cost(cut.counts)
    floor = fit.cost(fit.at_rank(0))
    assert cut.cost <= max(fit.limit, floor)
    for site, count in enumerate(cut.counts):
        assert 1 <= count <= widths[site]
        assert count % round_to == 0 or count == widths[site]
        if count < widths[site] and floor <= fit.limit:
            more = list(cut.counts)
            more[site] = min(count + round_to, widths[site])
            assert fit.cost(tuple(more)) > fit.limit


def test_one_percent_is_reached_even_on_the_small_default_network():
    widths, factors = (32, 32, 64, 64, 128, 128), (576, 576, 144, 144, 36, 36, 1)
    for seed in range(20):
        for share in (0.2, 0.5, 0.8):
            fit = fitter(widths, seed=seed, share=share, factors=factors)
            assert 0.99 * fit.limit <= fit.fit().cost <= fit.limit


def test_channels_stay_in_the_order_of_their_probability():
    fit = fitter(seed=3)
    masks = fit.masks(fit.fit().counts)
    for name, mask in masks.items():
        column = torch.from_numpy(fit.scores[fit.units.index((name,))])
        assert column[mask].min() > column[~mask].max()


@pytest.mark.parametrize("limit", [4.0, 6.0, 9.0])
def test_a_cost_at_the_limit_fits(limit):
    fit = CutSearch({"a": torch.linspace(0.9, 0.1, 6)}, {"a": 0}, 1, lambda masks: float(masks["a"].sum()), limit)
    assert fit.rank() == min(limit, 6)


def test_the_highest_floor_of_coupled_sites_holds_for_all():
    scores = {"a": torch.ones(6), "b": torch.ones(6)}
    search = CutSearch(scores, {"a": 1, "b": 3}, 1, lambda masks: float(masks["a"].sum()), 0.0, [("a", "b")])
    assert search.at_rank(0) == (3,)


def test_what_is_off_stays_off():
    scores = {f"s{i}": torch.linspace(0, 1, 32) for i in range(2)}
    scores["s0"][:24] = -torch.inf
    search = CutSearch(scores, dict.fromkeys(scores, 4), 2, chain_cost((9, 9, 1)), 1e9)
    assert search.fit().counts == (8, 32)


def test_coupled_sites_keep_the_same_channels():
    generator = torch.Generator().manual_seed(0)
    scores = {f"s{i}": torch.rand(32, generator=generator) for i in range(3)}

    def cost(masks):  # a channel costs where both keep it
        return float(30 * (masks["s0"] & masks["s1"]).sum() + masks["s2"].sum())

    search = CutSearch(scores, dict.fromkeys(scores, 2), 1, cost, 500.0, coupled=[("s0", "s1")])
    cut = search.fit()
    masks = search.masks(cut.counts)
    assert torch.equal(masks["s0"], masks["s1"])
    assert 470 < cut.cost <= 500
    least = torch.minimum(scores["s0"], scores["s1"])
    assert least[masks["s0"]].min() > least[~masks["s0"]].max()


def test_a_cut_in_force_is_mended_not_made_anew():
    fit = fitter(seed=4)
    good = fit.fit()
    over = Cut(tuple(count + 1 for count in good.counts), fit.cost(tuple(count + 1 for count in good.counts)))
    assert over.cost > fit.limit
    mended = fit.refine(over)
    assert 0.99 * fit.limit <= mended.cost <= fit.limit
    assert sum(abs(a - b) for a, b in zip(mended.counts, over.counts, strict=True)) <= 8


def test_a_cut_over_the_limit_loses_its_worst_channel_down_to_the_floor():
    scores = {"a": torch.linspace(0.2, 0.1, 4), "b": torch.linspace(0.9, 0.8, 4)}
    fit = CutSearch(scores, {"a": 1, "b": 1}, 1, lambda masks: float(sum(mask.sum() for mask in masks.values())), 5.0)
    assert fit.refine(Cut((2, 4), 6.0)).counts == (1, 4)


def test_channels_that_only_save_something_together_go_together():
    fit = CutSearch({"a": torch.ones(4)}, {"a": 0}, 1, lambda masks: 10.0 if masks["a"].sum() > 2 else 2.0, 5.0)
    assert fit.refine(Cut((4,), 10.0)) == Cut((2,), 2.0)


def test_an_exchange_closes_a_gap_that_no_single_channel_fits_into():
    # Nine channels of 10, then such of 7: the row's order leaves 90 of 95, into which no seven fits.
    alive = {"a": torch.linspace(0.99, 0.91, 9), "b": torch.linspace(0.5, 0.1, 12)}

    def cost(masks):
        return 10.0 * int(masks["a"].sum()) + 7.0 * int(masks["b"].sum())

    fit = CutSearch(alive, {"a": 0, "b": 0}, 1, cost, 95.0)
    cut = fit.fit()
    assert cut == Cut((8, 2), 94.0) or cut.cost == 95.0
    assert 0.99 * fit.limit <= cut.cost


def test_channels_that_nobody_reads_do_not_come_back():
    alive = {"a": torch.linspace(0.9, 0.1, 10), "dead": torch.linspace(0.05, 0.01, 10)}
    fit = CutSearch(alive, {"a": 0, "dead": 0}, 1, lambda masks: 10.0 * int(masks["a"].sum()), 55.0)
    assert fit.fit().counts == (5, 0)


def test_equal_probabilities_are_cut_in_the_order_of_the_channels():
    alive = {"a": torch.full((6,), 0.5)}
    fit = CutSearch(alive, {"a": 0}, 1, lambda masks: float(masks["a"].sum()), 4.0)
    assert fit.masks(fit.fit().counts)["a"].tolist() == [True] * 4 + [False] * 2


@pytest.mark.parametrize("round_to", [4, 8])
def test_a_width_that_is_no_multiple_may_stay_whole(round_to):
    alive = {"a": torch.linspace(0.9, 0.1, 10)}
    fit = CutSearch(alive, {"a": 0}, round_to, lambda masks: float(masks["a"].sum()), 9.0)
    assert fit.fit().counts == (8,)
    assert fit.at_rank(9) == (10,)
    assert fit.refine(Cut((10,), 10.0)).counts == (8,)


def test_a_branch_whose_first_channel_costs_much_stays_where_others_make_room():
    scores = {"trunk": torch.linspace(0.9, 0.5, 10), "branch": torch.linspace(0.4, 0.1, 4)}

    def cost(masks):  # what the trunk writes is read by the branch alone
        trunk, branch = (int(masks[name].sum()) for name in scores)
        return 10.0 + trunk * (8 + branch) if branch else 10.0

    fit = CutSearch(scores, {"trunk": 0, "branch": 0}, 1, cost, 60.0)
    assert fit.cost(fit.at_rank(fit.rank())) == 10.0, "the best that fit are all of the trunk, which nothing reads"
    cut = fit.fit()
    assert 55.0 < cut.cost <= 60.0
    assert all(cut.counts)
    assert fit.floors == [0, 0]
