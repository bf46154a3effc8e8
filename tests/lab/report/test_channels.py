"""Both decisions on channels known by hand, and which channels of a layer are drawn, in which order."""

import random
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from softprune.lab.report.channels import KEPT_ROWS, QUADRANTS, ROWS, DropRule, decide, exemplar, layer
from softprune.lab.runs.result import SiteRecord

RULE = DropRule(delta=0.05, c=0.95)


def made(beta: tuple[float, ...], gamma: tuple[float, ...], keep: tuple[bool, ...]) -> SiteRecord:
    return SiteRecord(name="bn", activation="relu", width=len(keep), kept=sum(keep), beta=beta, gamma=gamma, keep=keep)


def random_site(width: int, seed: int = 0) -> SiteRecord:
    rng = random.Random(seed)
    beta = tuple(rng.gauss(-0.3, 0.4) for _ in range(width))
    gamma = tuple(rng.gauss(0, 0.3) for _ in range(width))
    keep = tuple(not RULE.drops(b, g) for b, g in zip(beta, gamma, strict=True))
    return made(beta, gamma, keep)


def test_every_channel_of_a_small_layer_from_alive_to_dead() -> None:
    site = random_site(30)
    view = layer(site, RULE)
    assert sorted(view["order"]) == list(range(30))
    masses = [RULE.dead_mass(site.beta[i], site.gamma[i]) for i in view["order"]]
    assert masses == sorted(masses)
    assert view["tally"] == f"bn: {site.kept} kept, {30 - site.kept} dropped"


def test_a_wide_layer_is_thinned_with_room_for_both_kinds() -> None:
    site = random_site(512)
    view = layer(site, RULE)
    assert len(view["order"]) == len(set(view["order"])) == ROWS
    assert sum(site.keep[i] for i in view["order"]) == KEPT_ROWS
    assert view["range"][0] < RULE.delta < view["range"][1]
    assert "40 drawn" in view["tally"]


def test_the_rows_go_to_the_kind_that_needs_them() -> None:
    all_kept = made((0.5,) * 90, (0.1,) * 90, (True,) * 90)
    assert len(layer(all_kept, RULE)["order"]) == ROWS
    few_kept = made((-2.0,) * 90, (0.1,) * 90, (True,) * 3 + (False,) * 87)
    view = layer(few_kept, RULE)
    assert view["order"][:3] == [0, 1, 2]
    assert len(view["order"]) == ROWS


def test_scales_of_zero_are_drawn() -> None:
    site = made((-0.4, 0.4), (0.0, 0.0), (False, True))
    view = layer(site, RULE)
    assert view["order"] == [1, 0]
    assert view["range"][0] < RULE.delta < view["range"][1]


def site(beta: list[float], gamma: list[float], keep: list[bool] | None = None, name: str = "bn") -> SiteRecord:
    keep = keep or [not RULE.drops(b, g) for b, g in zip(beta, gamma, strict=True)]
    return SiteRecord(
        name=name,
        activation="relu",
        width=len(beta),
        kept=sum(keep),
        beta=tuple(beta),
        gamma=tuple(gamma),
        keep=tuple(keep),
    )


@given(st.floats(-5, 5), st.floats(-3, 3))
def test_a_channel_is_dropped_exactly_left_of_the_line(beta: float, gamma: float) -> None:
    margin = beta + RULE.z * abs(gamma) - RULE.delta
    if abs(margin) > 1e-6:
        assert RULE.drops(beta, gamma) == (margin < 0)


def test_the_slope_of_the_papers_line() -> None:
    assert DropRule(0.05, 0.95).z == pytest.approx(1.6449, abs=1e-4)


def test_the_four_cases_of_the_papers_figure() -> None:
    # Wide and alive; wide but far below zero; narrow yet above delta; narrow and below.
    found = decide([site([0.0, -1.0, 0.5, -0.3], [0.5, 0.4, 0.1, 0.05])], RULE, recorded=True)
    assert found is not None
    assert [channel.quadrant for channel in found.channels] == ["keep", "scp", "slimming", "drop"]
    assert found.counts == {"keep": 1, "slimming": 1, "scp": 1, "drop": 1}
    assert 0.1 < found.threshold < 0.4


def test_slimming_ranks_the_whole_network_at_the_same_number() -> None:
    layers = [site([-1.0, -1.0, 0.2], [0.3, 0.2, 0.9]), site([0.3, 0.3, -2.0], [0.01, -0.02, 0.8])]
    found = decide(layers, RULE, recorded=True)
    assert found is not None
    slimmed = {(c.site, c.index) for c in found.channels if c.slimming_drops}
    assert slimmed == {(1, 0), (1, 1), (0, 1)}
    assert len(slimmed) == sum(c.scp_drops for c in found.channels)


def test_recorded_masks_count_where_they_differ_from_the_rule() -> None:
    rounded_up = site([-1.0, -1.0], [0.1, 0.1], keep=[True, False])
    recorded, ruled = decide([rounded_up], RULE, True), decide([rounded_up], RULE, False)
    assert recorded is not None
    assert ruled is not None
    assert [c.scp_drops for c in recorded.channels] == [False, True]
    assert [c.scp_drops for c in ruled.channels] == [True, True]


def test_nothing_and_everything_dropped_are_no_special_cases() -> None:
    alive, dead = decide([site([1.0], [0.1])], RULE, True), decide([site([-9.0], [0.1])], RULE, True)
    assert alive is not None
    assert dead is not None
    assert alive.counts["keep"] == 1
    assert dead.counts["drop"] == 1


def test_sites_without_recorded_channels_are_left_out() -> None:
    unrecorded = SiteRecord(name="bn", activation="relu", width=4, kept=2)
    assert decide([unrecorded], RULE, True) is None
    found = decide([unrecorded, site([0.1], [0.2])], RULE, True)
    assert found is not None
    assert [c.site for c in found.channels] == [1]


def test_the_exemplar_is_a_real_channel_of_its_kind() -> None:
    found = decide([site([0.0, 0.1, 0.2, -3.0], [0.5, 0.5, 0.5, 0.01])], RULE, True)
    assert found is not None
    typical = exemplar(found, "keep")
    assert typical is not None
    assert typical.index == 1
    assert exemplar(found, "scp") is None
    assert set(QUADRANTS) == set(found.counts)


def test_dead_mass_is_the_normal_distribution_function() -> None:
    assert RULE.dead_mass(-0.2, 0.3) == pytest.approx(NormalDist(-0.2, 0.3).cdf(0.05), abs=1e-6)
    assert RULE.dead_mass(-0.2, 0.0) == 1.0
